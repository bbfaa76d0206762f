"""Steps whose loss or gradients are not finite stop the run or are left out, and nothing of them is applied."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pipedejavu.engine import audit
from pipedejavu.engine.engine_state import take_all
from pipedejavu.facts import InputError
from pipedejavu.plan.axis import Rest
from tests.one_device.lab import Run, check_equal, plan_of

PLACES: list[tuple[Rest, ...]] = [("device",) * 4, ("host",) * 4, ("device", "visit", "host", "lean")]


def spoil(run: Run, microbatch: int, value: float) -> None:
    run.batches.x[microbatch] = torch.full_like(run.batches.x[microbatch], value)


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_a_loss_that_is_not_finite_stops_the_run_before_anything_is_applied(places: Any, clip_norm: Any) -> None:
    run = Run(plan_of(places, clip=clip_norm is not None, microbatches=2), clip_norm=clip_norm)
    spoil(run, 3, float("nan"))
    threads = run.start()
    threads.run()
    before = {name: tensor.clone() for name, tensor in take_all(threads).items()}
    with pytest.raises(InputError, match=r"^the loss is nan in step 2, microbatch 3, on worker 0; lower the learning"):
        threads.run()
    after = {n: w for some in threads.outcome().weights.values() for n, w in some.items()}
    check_equal(after, {name.removeprefix("weight/"): t for name, t in before.items() if name.startswith("weight/")})
    with pytest.raises(InputError, match=r"^the loss is nan in step 2"):
        threads.run()
    threads.close()


def nan_gradient(x: Tensor, size: float) -> Tensor:
    """Returns the tensor, whose gradient is multiplied by a factor."""
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * size)
    return x


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (float("nan"), r"^the gradient of 'u[012]\.0\.(weight|bias)' is nan in step 1 on worker 0; lower the learning"),
        (float("inf"), r"^the gradient of 'u[012]\.0\.(weight|bias)' is (nan|inf) in step 1 on worker 0; lower the le"),
    ],
)
def test_a_gradient_that_is_not_finite_is_named(places: Any, clip_norm: Any, factor: float, message: str) -> None:
    run = Run(plan_of(places, clip=clip_norm is not None), clip_norm=clip_norm)
    unit = run.units[2][1]
    unit.register_forward_hook(lambda _module, _inputs, output: nan_gradient(output, factor))
    threads = run.start()
    with pytest.raises(InputError, match=message):
        threads.run()
    threads.close()


@pytest.mark.parametrize("places", PLACES)
def test_a_gradient_too_large_for_the_optimizer_is_named_unless_it_is_clipped(places: Any) -> None:
    runs = [Run(plan_of(places, clip=clips), clip_norm=0.05 if clips else None, rounds=1) for clips in (False, True)]
    for run in runs:
        run.units[2][1].register_forward_hook(lambda _module, _inputs, output: nan_gradient(output, 1e24))
    with pytest.raises(
        InputError, match=r"reaches [\d.]+e\+\d+ in step 1 on worker 0, and the optimizer overflows bey"
    ):
        runs[0].outcome  # noqa: B018
    assert all(weight.isfinite().all() for weight in runs[1].weights.values())
    assert runs[1].outcome.logs[0].events[-1][-1] > 0


@pytest.mark.parametrize("places", PLACES)
def test_a_skipped_update_leaves_weights_moments_and_statistics(places: Any) -> None:
    run = Run(plan_of(places, clip=True), "convnet", clip_norm=0.05, rounds=5, extra={"on_nan": "skip"})
    spoil(run, 2, float("inf"))
    threads = run.start()
    states = []
    for _ in range(5):
        threads.run()
        states.append({name: tensor.clone() for name, tensor in take_all(threads).items()})
    assert list(threads.handlers[0].log.skipped) == [3]
    assert "the loss is nan in step 3, microbatch 2, on worker 0" in threads.handlers[0].log.skipped[3]
    check_equal(states[1], states[2])
    assert any(not torch.equal(states[2][name], states[3][name]) for name in states[2])
    threads.close()
    assert max(audit(run.program, run.job, run.batches, run.outcome).values()) <= run.tolerance()


def test_too_many_skipped_updates_in_a_row_stop_the_run() -> None:
    extra = {"on_nan": "skip", "max_consecutive_skips": 2}
    run = Run(plan_of(("host",) * 4, clip=True), clip_norm=0.05, extra=extra)
    for microbatch in (1, 2):
        spoil(run, microbatch, float("inf"))
    with pytest.raises(
        InputError, match=r"^2 updates in a row were left out \(--max-consecutive-skips 2\), the last be"
    ):
        run.outcome  # noqa: B018


def test_a_step_without_labels_that_count_is_refused() -> None:
    run = Run(plan_of(("host",) * 4))
    run.batches.counts[0] = 0
    with pytest.raises(
        InputError, match=r"^no sample or label of update 1 counts; leave such samples out, or use larg"
    ):
        run.outcome  # noqa: B018
