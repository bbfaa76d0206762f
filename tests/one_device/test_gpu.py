"""What must hold on a GPU: the bits of HybridAdamW in a plain loop, and the audit, also if any lane is late."""

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pipedejavu.engine import Outcome, audit
from pipedejavu.engine.verdict import judge
from pipedejavu.plan import Keep, Precision
from tests.one_device.lab import SPLIT, Run, check_equal, plan_of

PLACES: dict[str, dict[str, Any]] = {
    "all on the device": {},
    "device, visit, host, lean": {"places": ("device", "visit", "host", "lean")},
    "all streamed": {"places": ("visit",) * 4, "visitors": 2},
    "all on the host": {"places": ("host",) * 4},
    "window": {"places": ("device", "window", "window", "host"), "recompute": (1, 2)},
    "all through a window": {"keep": Keep(kind="host", window=1), "prefetch": 1},
    "activations on the host": {"activations": "host", "places": ("device", "host", "lean", "host")},
}
DTYPES = [torch.float32, torch.bfloat16]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def run_of(name: str, clip_norm: float | None, dtype: torch.dtype, **axes: Any) -> Run:
    if dtype == torch.bfloat16:
        axes["precision"] = SPLIT
    plan = plan_of(**PLACES[name], clip=clip_norm is not None, **axes)
    return Run(plan, clip_norm=clip_norm, rounds=6, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("clip_norm", [None, 0.05, 1e9], ids=["unclipped", "clipped", "hardly clipped"])
@pytest.mark.parametrize("name", PLACES)
def test_every_place_has_the_bits_of_hybrid_adamw_and_passes_the_audit(
    name: str, clip_norm: float | None, dtype: torch.dtype
) -> None:
    run = run_of(name, clip_norm, dtype)
    check_equal(run.weights, run.trained_by("hybrid"))
    if dtype == torch.float32:
        on_cpu = Outcome(run.outcome.weights, run.outcome.logs, run.outcome.spans)
        assert max(audit(run.program, run.job, run.batches, on_cpu).values()) <= 2 * run.tolerance()


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("name", PLACES)
def test_float32_models_in_bf16_train_as_in_a_plain_loop_under_autocast(name: str, clip_norm: float | None) -> None:
    run = run_of(name, clip_norm, torch.float32, precision=SPLIT)
    check_equal(run.weights, run.trained_by("hybrid"))
    if clip_norm is None:
        check_equal(run.weights, run.by_actions())
    verdict = judge(run.program, run.job, run.batches, run.outcome)
    assert verdict.is_passed, str(verdict)


@pytest.mark.parametrize("precision", [Precision(), SPLIT], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["all on the device", "device, visit, host, lean", "all through a window"])
def test_compiled_units_pass_the_audit(name: str, precision: Precision) -> None:
    torch._dynamo.reset()
    run = run_of(name, 0.05, torch.float32, precision=precision, compiled=True)
    verdict = judge(run.program, run.job, run.batches, run.outcome)
    assert verdict.is_passed, str(verdict)


@pytest.mark.parametrize("precision", [Precision(), SPLIT], ids=["fp32", "bf16"])
def test_a_head_in_chunks_passes_the_audit(precision: Precision) -> None:
    run = run_of("device, visit, host, lean", 0.05, torch.float32, precision=precision, head_chunks=2)
    verdict = judge(run.program, run.job, run.batches, run.outcome)
    assert verdict.is_passed, str(verdict)


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("name", PLACES)
def test_late_lanes_change_no_bit(name: str, clip_norm: float | None) -> None:
    expected = run_of(name, clip_norm, torch.bfloat16).weights
    run = run_of(name, clip_norm, torch.bfloat16)
    threads, draw = run.start(), random.Random(name)
    lanes: Any = threads.handlers[0].optimizer.scheduler.lanes  # type: ignore[attr-defined]
    for lane in lanes.all:
        is_stream = lane.name in ("copy-in", "copy-out")
        lane.delay = (
            (lambda: torch.cuda._sleep(draw.choice([0, 500_000, 4_000_000])))
            if is_stream
            else (lambda: time.sleep(draw.choice([0, 0.001, 0.004])))
        )
    for number in range(run.rounds):
        threads.handlers[0].needs_spans = number == run.rounds - 1
        spans = threads.run()
    found = {n: w.cpu().clone() for some in threads.outcome().weights.values() for n, w in some.items()}
    threads.close()
    check_equal(found, expected)
    passes = {str(a) for a in run.program.workers[0].actions if a.kind in "FB" or a.kind == "UPDATE"}
    assert passes <= {span.action for span in spans}


@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches_add_up(microbatches: int) -> None:
    plan = plan_of(("device", "visit", "host", "lean"), clip=True, microbatches=microbatches)
    run = Run(plan, clip_norm=0.05, device="cuda")
    check_equal(run.weights, run.trained_by("hybrid"))


def test_a_model_on_the_gpu_is_trained_in_place() -> None:
    from tests.one_device.test_start import batch_of, model_of, trainer_of

    model = model_of(torch.bfloat16).cuda()
    places = [weight.data_ptr() for weight in model.parameters()]
    trainer = trainer_of(model, plan_of(("device", "visit", "host", "lean"), precision=SPLIT))
    assert trainer.threads.handlers[0].job.units[0][1] is model[0]
    losses = [trainer.step(batch_of(0, torch.bfloat16)) for _ in range(20)]
    assert losses[-1] < losses[0]
    assert all(weight.is_cuda for weight in model.state_dict().values())
    assert [weight.data_ptr() for weight in model.parameters()] == places
