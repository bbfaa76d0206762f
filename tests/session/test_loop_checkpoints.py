"""Checkpoints of a user's own loop: with a Trainer, with torch's optimizers, and with HybridAdamW."""

import copy
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from torch import nn

import pipedejavu as pdv
from pipedejavu.engine import AdamW, Sgd
from pipedejavu.facts import InputError
from pipedejavu.plan import Plan
from pipedejavu.session import Checkpoints, Trainer
from pipedejavu.store import Checkpoint, CheckpointDir
from tests.session.test_trainer import batch, loss, model, residual, texts


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.save_to_model().named_parameters()}


def equal(first, second) -> bool:
    assert first.keys() == second.keys()
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


SYNCHRONOUS = ["1f1b", "ddp", "zb-h1", "chimera", "interleaved", "coarse", "fine", "zero-offload", "l2l"]


@pytest.mark.parametrize("plan", [*SYNCHRONOUS, "pipedream", "pipedream-2bw"])
def test_a_trainer_continues_bit_for_bit(tmp_path: Path, plan: str) -> None:
    workers = 1 if plan in ("zero-offload", "l2l") else 2
    batches = [batch(48, seed) for seed in range(5)]

    def make(plan: str | Plan) -> Trainer:
        return Trainer(model(), loss, sample=batches[0], plan=plan, workers=workers, optimizer=AdamW(lr=0.01))

    whole = make(plan)
    for n, given in enumerate(batches):
        whole.step(given)
        if n in (1, 2):
            whole.save(tmp_path)
    whole.wait()
    again = make(whole.program.plan)  # shares, where a plan has some, are measured; measured again they may be others
    assert again.load(tmp_path) == 3 * whole.program.plan.steps
    assert again.samples == 3 * 48
    for given in batches[3:]:
        again.step(given)
    assert again.updates == whole.updates
    assert equal(weights_of(again), weights_of(whole))


@pytest.mark.parametrize("plan", ["1f1b", "ddp", "zero-offload", "pipedream"])
def test_a_trainer_goes_back_and_trains_again(tmp_path: Path, plan: str) -> None:
    workers = 1 if plan == "zero-offload" else 2
    trainer = Trainer(model(), loss, sample=batch(48), plan=plan, workers=workers, optimizer=AdamW(lr=0.01))
    found = []
    for n in range(3):
        trainer.step(batch(48, n))
        if n == 0:
            trainer.save(tmp_path)
    found.append(weights_of(trainer))
    assert trainer.load(tmp_path) == trainer.program.plan.steps
    for n in (1, 2):
        trainer.step(batch(48, n))
    found.append(weights_of(trainer))
    assert equal(*found)


def test_a_trainer_continues_with_another_plan_within_rounding(tmp_path: Path) -> None:
    batches = [batch(32, seed) for seed in range(4)]
    optimizer = Sgd(lr=0.1, momentum=0.9)
    whole = Trainer(model(), loss, sample=batches[0], plan="1f1b", workers=3, optimizer=optimizer)
    for given in batches[:2]:
        whole.step(given)
    whole.save(tmp_path)
    for given in batches[2:]:
        whole.step(given)
    whole.wait()
    expected = weights_of(whole)
    for plan, workers in [("ddp", 4), ("gpipe", 2), ("chimera", 2), ("zero-offload", 1)]:
        other = Trainer(model(), loss, sample=batches[0], plan=plan, workers=workers, optimizer=optimizer)
        other.load(tmp_path)
        assert all(
            torch.equal(w, before) for w, before in zip(weights_of(other).values(), saved(tmp_path), strict=True)
        )
        for given in batches[2:]:
            other.step(given)
        # Weights below 2 in float64, two updates of sums of 32 gradients.
        assert max(float((w - expected[n]).abs().max()) for n, w in weights_of(other).items()) < 1e-13


def saved(folder: Path) -> list[torch.Tensor]:
    found = CheckpointDir(folder).newest(pytest.fail)
    return [found.tensor(f"weight/{name}") for name, _ in model().named_parameters()]


def test_a_manifest_says_what_was_saved(tmp_path: Path) -> None:
    trainer = Trainer(model(), loss, sample=batch(8), plan="1f1b", workers=2, optimizer=Sgd(lr=0.1))
    losses = [trainer.step(batch(8, seed)) for seed in range(3)]
    trainer.save(tmp_path)
    trainer.wait()
    found = Checkpoint(tmp_path / "step-3").manifest
    assert found.plan["name"] == "1f1b"
    assert found.samples == 24
    assert found.loss == pytest.approx(sum(losses) / 3)
    assert json.loads((tmp_path / "step-3" / "manifest.json").read_text())["libraries"]["torch"] == torch.__version__


def test_a_folder_without_checkpoints_loads_nothing(tmp_path: Path) -> None:
    trainer = Trainer(model(), loss, sample=batch(8), workers=2)
    assert trainer.load(tmp_path / "none") == 0
    assert Checkpoints(tmp_path / "none").load(model()) == (0, 0)


def test_a_broken_checkpoint_is_named_and_the_one_before_it_loads(tmp_path: Path, capsys) -> None:
    trainer = Trainer(model(), loss, sample=batch(8), workers=2)
    for seed in range(2):
        trainer.step(batch(8, seed))
        trainer.save(tmp_path)
    trainer.wait()
    part = tmp_path / "step-2" / "part-00000.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    assert trainer.load(tmp_path) == 1
    assert "pipedejavu: checkpoint step-2 cannot be used and is set aside as step-2.bad: " in capsys.readouterr().err


# A plain loop.


class Net(nn.Module):
    """A model with tied weights, dropout and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.last(self.drop(self.norm(self.first(x)))))


def net(dtype=torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def make_loop(kind: str, own: nn.Module):
    groups = [
        {"params": [own.first.weight], "weight_decay": 0.1},
        {"params": [*own.norm.parameters(), *own.head.parameters()]},
    ]
    if kind == "hybrid":
        optimizer = pdv.HybridAdamW(own, groups, lr=0.01, clip_norm=1.0, window=None)
    elif kind == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=0.01)
    else:
        optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def train_loop(own, optimizer, scheduler, batches) -> None:
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(own(inputs.to(own.head.weight.dtype)), targets).backward()
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["hybrid", "adamw", "sgd"])
def test_a_plain_loop_continues_bit_for_bit(tmp_path: Path, kind: str, dtype) -> None:
    """Weights, state, schedule, running statistics, and the masks of dropout that come next."""
    batches = [batch(16, seed) for seed in range(6)]
    own = net(dtype)
    optimizer, scheduler = make_loop(kind, own)
    checkpoints = pdv.Checkpoints(tmp_path)
    train_loop(own, optimizer, scheduler, batches[:3])
    checkpoints.save(own, optimizer, step=3, samples=48, scheduler=scheduler)
    train_loop(own, optimizer, scheduler, batches[3:])
    checkpoints.wait()
    other = net(dtype)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    again, schedule = make_loop(kind, other)
    torch.manual_seed(99)
    assert pdv.Checkpoints(tmp_path).load(other, again, scheduler=schedule) == (3, 48)
    train_loop(other, again, schedule, batches[3:])
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.01 * 0.5**3
    assert equal(other.state_dict(), own.state_dict())


@pytest.mark.parametrize(
    ("kind", "moments"), [("torch", "fp32"), ("hybrid", "fp32"), ("torch", "int8"), ("hybrid", "int8")]
)
def test_what_a_trainer_saved_continues_in_a_plain_loop(tmp_path: Path, kind: str, moments: str) -> None:
    """And tied weights, which the Trainer has in two places, are one again."""
    batches = [texts(8, seed) for seed in range(4)]
    settings = {"lr": 0.01, "weight_decay": 0.1}
    trainer = Trainer(
        residual().float(), None, sample=narrow(batches[0]), plan="1f1b", workers=2, optimizer=AdamW(**settings),
        precision=f"fp32, {moments} moments",
    )  # fmt: skip
    for given in batches[:2]:
        trainer.step(narrow(given))
    trainer.save(tmp_path)
    for given in batches[2:]:
        trainer.step(narrow(given))
    trainer.wait()
    expected = weights_of(trainer)
    own = residual().float()
    if kind == "torch":
        optimizer = torch.optim.AdamW(own.parameters(), **settings)
    else:
        optimizer = pdv.HybridAdamW(own, **settings, moments=moments)
    assert pdv.Checkpoints(tmp_path).load(own, optimizer) == (2, 16)
    for given in batches[2:]:
        optimizer.zero_grad()
        own(**narrow(given))["loss"].backward()
        optimizer.step()
    for name, weight in own.state_dict().items():
        if name in expected:
            # In float32 a weight whose gradient is nearly nothing may go either way, by up to lr a step.
            # torch's moments are float32 from then on: those of two updates move a weight by less than an eighth of lr.
            assert float((weight - expected[name]).abs().max()) < 2 * 0.01 * 2
            is_rounded = (kind, moments) == ("torch", "int8")
            assert float((weight - expected[name]).abs().mean()) < (0.01 / 4 if is_rounded else 1e-5)


def narrow(given):
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in given.items()}


def test_another_model_is_refused(tmp_path: Path) -> None:
    own = net()
    optimizer, _ = make_loop("adamw", own)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(own, optimizer, step=1)
    with pytest.raises(InputError, match=r"has no weight '0\.0\.weight'; it is of another model"):
        checkpoints.load(model())
    other = copy.deepcopy(own)
    other.head = nn.Linear(6, 5)
    with pytest.raises(InputError, match=r"'head.weight' is \(3, 6\) in the checkpoint and \(5, 6\) in the model"):
        checkpoints.load(other)
    with pytest.raises(InputError, match="parameter 0 of the optimizer is not the model's; give the model that is"):
        checkpoints.save(net(), optimizer, step=2)
