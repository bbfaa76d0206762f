"""An audit that printed 0.493 for a corrupted replica and exited 0: sound runs pass, and corrupted ones fail."""

import json
import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from typer.testing import CliRunner

from pipedejavu.cli.main import app
from pipedejavu.engine import AdamW, Sgd, Threads, Verdict, judge, run_threads
from pipedejavu.engine.applier import Applier
from pipedejavu.engine.audit import Replay
from pipedejavu.engine.handlers import Handlers
from tests.engine.case import MODELS, Case, make_case
from tests.engine.test_presets import SCORED, SYNCHRONOUS, VERSIONED

SGD, ADAMW = Sgd(lr=0.1, momentum=0.9), AdamW(lr=1e-2)
DTYPES = (torch.float32, torch.float64)
RUNNABLE = {**SYNCHRONOUS, **VERSIONED, **SCORED}


def case_of(name: str, model: str, optimizer: Sgd | AdamW, dtype: torch.dtype = torch.float32, **more) -> Case:
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    workers, microbatches = RUNNABLE[name][0]
    sizes = {"workers": workers, "microbatches": microbatches, "steps": 3} | more
    return make_case(name, model, optimizer=optimizer, **sizes)


def verdict_of(case: Case, outcome=None) -> Verdict:
    return judge(case.program, case.job, case.batches, outcome or case.outcome)


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_sound_run_passes(name: str) -> None:
    """Attention's key biases have a true gradient of zero, so AdamW turns rounding into steps of about lr."""
    for model, optimizer in (("mlp", SGD), ("calm-gpt", ADAMW)):
        verdict = verdict_of(case_of(name, model, optimizer))
        assert verdict.is_passed, verdict
        assert str(verdict).startswith("audit passed: largest difference ")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", RUNNABLE)
def test_sound_runs_of_every_model_pass(name: str, dtype: torch.dtype) -> None:
    for model in MODELS:
        for optimizer in (SGD, Sgd(lr=0.1), ADAMW):
            verdict = verdict_of(case_of(name, model, optimizer, dtype))
            assert verdict.is_passed, verdict


def test_a_second_replay_in_float64_rounds_otherwise() -> None:
    """Without a nudge both replays would have equal bits, and no rounding at all would be allowed for."""
    case = case_of("1f1b", "calm-gpt", ADAMW, torch.float64)
    plain, again, nudged = (
        Replay(case.program, case.job, case.batches, in_double=in_double, nudge=nudge).run(case.outcome.logs)
        for in_double, nudge in ((True, None), (False, None), (False, 0))
    )
    pairs = [(plain[home][n], again[home][n], nudged[home][n]) for home in plain for n in plain[home]]
    assert all(torch.equal(one, same) for one, same, _ in pairs)
    distances = [float((one - other).abs().max()) for one, _, other in pairs]
    assert 0 < max(distances) < 1e-9


def flip(threads: Threads, worker: int, source: random.Random) -> str:
    """Flips one exponent bit of one weight that a worker holds; returns the parameter's name."""
    own = threads.handlers[worker]
    held = [(key, name) for key in own.values if key[0] == "w" for name in own.values[key]]
    key, name = source.choice([(key, name) for key, name in held if name.endswith("weight")])
    weight = own.values[key][name].data
    bits = weight.view(torch.int32 if weight.dtype == torch.float32 else torch.int64).view(-1)
    number = source.randrange(bits.numel())
    low, high = (23, 30) if weight.dtype == torch.float32 else (52, 62)
    bits[number] ^= 1 << source.randrange(low, high)
    return name


@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_exponent_bit_in_one_replica_fails(seed: int) -> None:
    source = random.Random(seed)
    optimizer, dtype = (SGD, ADAMW)[seed % 2], (torch.float32, torch.float64)[seed // 2 % 2]
    case = case_of("ddp", "mlp", optimizer, dtype, steps=1, rounds=5)
    threads, when = Threads(case.program, case.job, case.batches), source.randrange(1, 5)
    for update in range(case.rounds):
        if update == when:
            flip(threads, 1, source)
        threads.run()
    verdict = verdict_of(case, threads.outcome())
    assert not verdict.is_passed, verdict
    assert " of replica 1 on worker 1 differs by " in str(verdict)
    assert verdict.to_dict()["verdict"] == "failed"


def wrong_coefficient(right):
    def updated(self, home, update, base, summed):
        factor = 1.01 if update == 1 else 1.0
        return right(self, home, update, base, {n: factor * g for n, g in summed.items()})

    return Applier, "_updated", updated


def left_out(right):
    def backward(self, a):
        total = self._of_update(a)
        before = {n: g.clone() for n, g in self.values.get(total, {}).items()}
        right(self, a)
        if a.microbatch == 1:
            zero = {n: torch.zeros_like(g) for n, g in self.values[total].items()}
            self.values[total] = before or zero

    return Handlers, "backward", backward


def momentum_lost(right):
    def updated(self, home, update, base, summed):
        if update == 2:
            for slots in self.state[home].values():
                slots[next(slot for slot in ("momentum", "m") if slot in slots)].zero_()
        return right(self, home, update, base, summed)

    return Applier, "_updated", updated


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("optimizer", [SGD, ADAMW])
@pytest.mark.parametrize("fault", [wrong_coefficient, left_out, momentum_lost])
def test_an_unsound_engine_fails(monkeypatch, fault, optimizer, dtype) -> None:
    case = case_of("1f1b", "calm-gpt", optimizer, dtype)
    target, name, _ = fault(None)
    with monkeypatch.context() as patch:
        patch.setattr(target, name, fault(getattr(target, name))[2])
        outcome = run_threads(case.program, case.job, case.batches)
    verdict = verdict_of(case, outcome)
    assert not verdict.is_passed, verdict


@pytest.mark.parametrize("optimizer", [SGD, ADAMW])
def test_two_microbatches_that_changed_places_fail(optimizer) -> None:
    case = case_of("1f1b", "mlp", optimizer, sizes=(3,))
    size = case.program.update_size
    swapped = case.make_samples([3] * len(case.batches.x), torch.Generator().manual_seed(5))
    for rows in (swapped.x, swapped.y):
        rows[0], rows[size] = rows[size], rows[0]
    assert not verdict_of(case, run_threads(case.program, case.job, swapped)).is_passed


def test_a_log_that_contradicts_the_plan_fails() -> None:
    case = case_of("1f1b", "mlp", SGD)
    del case.outcome.logs[0].events[-1]
    verdict = verdict_of(case)
    assert not verdict.is_passed
    assert str(verdict).startswith("audit failed: piece 0 of replica 0 had updates ")
    assert json.loads(json.dumps(verdict.to_dict(), allow_nan=False))["largest_difference"] is None


def test_a_run_that_rounding_leads_astray_is_told_to_take_float64() -> None:
    """At such a learning rate a difference in the last bit soon becomes one in the first."""
    wild = Sgd(lr=10.0)
    blurred, sharp = (verdict_of(case_of("1f1b", "mlp", wild, dtype, steps=25)) for dtype in DTYPES)
    assert blurred.is_passed
    assert blurred.blur > 0.1
    assert str(blurred).endswith(" as far as training did, so use --precision fp64 for a sharper audit")
    assert sharp.is_passed
    assert sharp.blur < 0.1
    assert str(sharp).endswith(" is rounding")


def test_a_weight_that_is_no_number_fails() -> None:
    case = case_of("1f1b", "mlp", SGD)
    next(iter(case.outcome.weights[0, 0].values()))[0] = float("nan")
    verdict = verdict_of(case)
    assert not verdict.is_passed
    json.dumps(verdict.to_dict(), allow_nan=False)


CORRUPTED = '''
import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Faulty(nn.Linear):
    """Flips a bit of its own weights once, in the process of the second worker."""

    calls = 0

    def forward(self, x):
        is_second = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
        Faulty.calls += is_second and self.training
        if Faulty.calls == 12:
            self.weight.data.view(-1).view(torch.int32)[3] ^= 1 << 28
        return super().forward(x)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, n):
        return torch.randn(6, generator=torch.Generator().manual_seed(n)), n % 3


def make():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Faulty(8, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, lambda output, target: cross_entropy(output, target, reduction="sum"), Data()
'''


def train(folder: Path, *more: str):
    (folder / "faulty.py").write_text(CORRUPTED)
    sizes = ("--plan", "preset:ddp", "--workers", "2", "--microbatches", "2", "--samples", "3", "--steps", "12")
    where = ("--run-dir", str(folder / "run"), "--json", "--lr", "0.05", "--optimizer", "sgd")
    return CliRunner().invoke(app, ["train", f"{folder / 'faulty.py'}:make", *sizes, *where, *more])


def test_train_exits_1_if_its_audit_fails(tmp_path: Path) -> None:
    done = train(tmp_path, "--audit", "--check-replicas", "0")
    assert done.exit_code == 1
    form = json.loads(done.stdout)
    assert form["audit"]["verdict"] == "failed"
    assert form["audit"]["largest_difference"] > 100 * form["audit"]["tolerance"] > 0
    assert "pipedejavu: audit failed: '2.weight' of replica 1 on worker 1 differs by " in done.stderr
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert "Audit failed: " in (tmp_path / "run" / "report.html").read_text()
