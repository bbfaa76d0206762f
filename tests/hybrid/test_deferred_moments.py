"""Moments that are written after all weights: the decision, the order of the host's work, and the same bits."""

import time
from typing import Any

import pytest
import torch

from pipedejavu.hybrid import state_placer
from pipedejavu.hybrid.deferred_moments import count_deferred
from pipedejavu.hybrid.step_time import PART_SHARE, StepTimes, estimate_step

STEPS = 6


def times(num_units: int, forward_s: float, host_s: float, rest_s: float) -> StepTimes:
    return StepTimes(forward_s=[forward_s] * num_units, host_s=[host_s] * num_units, rest_s=rest_s)


def test_all_units_defer_if_the_backward_hides_their_moments() -> None:
    step = times(10, 1.0, 4.0, 30.0)
    assert count_deferred(range(10), step) == 10
    assert estimate_step(range(10), step, 0) == 40 + 1 + 30
    assert estimate_step(range(10), step, 10) == pytest.approx(40 * PART_SHARE + 1 + 30)


def test_no_unit_defers_if_the_host_is_what_a_step_waits_for() -> None:
    assert count_deferred(range(10), times(10, 0.1, 4.0, 0.5)) == 0


def test_no_unit_defers_if_the_forward_hides_the_updates() -> None:
    assert count_deferred([8, 9], times(10, 1.0, 1.0, 30.0)) == 0


def test_some_units_defer_if_the_step_hides_a_part() -> None:
    step = times(10, 0.5, 4.0, 5.0)
    count = count_deferred(range(10), step)
    assert 0 < count < 10
    assert estimate_step(range(10), step, count) == min(estimate_step(range(10), step, n) for n in range(11))


@pytest.mark.parametrize("options", [{"gpu_units": 0}, {"gpu_units": 2}, {"gpu_units": 0, "window": 1}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_bits_are_those_of_one_update(dtype: torch.dtype, options: dict[str, Any], lab: Any) -> None:
    def loop(lab: Any, model: Any, optimizer: Any) -> None:
        lab.train(model, optimizer, range(STEPS))

    lab.check_same(loop, dtype=dtype, options={"clip_norm": 0.5, "speculate": False, **options})
    assert any("their moments after" in reason for reason in lab.made[-1].plan.reasons)


def test_gradients_and_checkpoints_wait_for_the_moments(lab: Any, bits: Any, compare: Any) -> None:
    model = lab.net()
    optimizer = lab.hybrid(model, clip_norm=0.5, gpu_units=0, speculate=False)
    optimizer.scheduler.lanes.host.delay = lambda: time.sleep(0.01)  # the next gradients come before the moments
    lab.train(model, optimizer, range(STEPS))
    saved = optimizer.state_dict()["state"]
    expected = lab.plain_bits(torch.bfloat16, 0.5, STEPS)
    for n, (name, _) in enumerate(model.named_parameters()):
        assert torch.equal(saved[n]["exp_avg"].view(-1).cpu(), expected[f"{name}: m"])
    compare(bits(optimizer, model), expected)


def test_weights_are_written_before_any_moments(lab: Any) -> None:
    model = lab.net()
    optimizer = lab.hybrid(model, clip_norm=0.5, gpu_units=0, speculate=False)
    lab.train(model, optimizer, range(2))
    optimizer.synchronize()
    recorder = optimizer.record()
    lab.train(model, optimizer, range(2, 3))
    optimizer.synchronize()
    host = [action for lane, action, _, _ in recorder.finish() if lane == "host"]
    units = range(len(optimizer.scheduler.unit_states))
    assert host == [f"UPDATE{n}~host" for n in units] + [f"UPDATE{n}~moments" for n in reversed(units)]


@pytest.mark.gpu
def test_a_gpu_defers_with_the_same_bits(cuda_lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_placer, "count_deferred", lambda on_host, _: len(on_host))

    def loop(lab: Any, model: Any, optimizer: Any) -> None:
        lab.train(model, optimizer, range(12))

    cuda_lab.check_same(loop, options={"clip_norm": 0.5, "gpu_units": 2, "speculate": False})
    assert any("their moments after" in reason for reason in cuda_lab.made[-1].plan.reasons)
