"""State that moves to other places between steps: the same bits, and only if measured times ask for it."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipedejavu.hybrid import state_placer
from pipedejavu.hybrid.placement import Limits, MemoryInterval, Placement, UnitSize, choose_placement, host_bytes
from pipedejavu.hybrid.step_time import StepTimes, estimate_step

UNITS = 6
STEPS = 8


def placed(optimizer: Any, places: list[str], arrivals: dict[int, tuple[int, ...]]) -> Placement:
    total = host_bytes(optimizer.scheduler.model_state.sizes, places)  # type: ignore[arg-type]
    return replace(optimizer.plan, places=tuple(places), host_bytes=total, arrivals=arrivals)


@pytest.mark.parametrize(
    ("seed", "moments"), [*((seed, "fp32") for seed in range(6)), (0, "bf16"), (1, "int8"), (2, "int8")]
)
def test_places_may_change_between_steps_without_a_bit(
    seed: int, moments: str, lab: Any, bits: Any, compare: Any
) -> None:
    draw = random.Random(seed)
    clip_norm, dtype = draw.choice([0.5, 1e9]), draw.choice([torch.bfloat16, torch.float32])
    model = lab.net(dtype)
    optimizer = lab.hybrid(model, clip_norm=clip_norm, moments=moments, speculate=False)
    for first in range(0, STEPS, 2):
        lab.train(model, optimizer, range(first, first + 2))
        places = [draw.choice(["gpu", "visit", "host", "lean"]) for _ in range(UNITS)]
        streamed = [n for n, place in enumerate(places) if place == "visit"]
        optimizer.synchronize()
        plan = placed(optimizer, places, {draw.randrange(UNITS): tuple(streamed[: draw.randrange(3)])})
        optimizer.scheduler.placer.change_to(plan)
        assert [unit.place for unit in optimizer.scheduler.unit_states] == places
    placer = optimizer.scheduler.placer
    held = [slab for unit in optimizer.scheduler.unit_states for slab in unit._slabs]
    held += [*placer.staging._slabs, *(streamed.slab for streamed in placer.streamed.values())]
    assert sum(slab.size_bytes for slab in held) == optimizer.plan.host_bytes
    compare(bits(optimizer, model), lab.plain_bits(dtype, clip_norm, STEPS, moments))


def step(units: int, forward_s: float, host_s: float, return_s: float, rest_s: float = 10.0) -> StepTimes:
    return StepTimes(
        forward_s=[forward_s] * units, host_s=[host_s] * units, rest_s=rest_s, return_s=[return_s] * units,
        fetch_s=[return_s] * units,
    )  # fmt: skip


def test_a_step_waits_for_the_host_for_returns_and_for_fetches() -> None:
    times = step(4, 1.0, 3.0, 2.0)
    assert estimate_step([0, 1, 2, 3], times) == 4 * 3 + 1 + 10
    assert estimate_step([2, 3], times, 0, [0, 1], 2) == 2 * 3 + 1 + 10
    # one at a time: the second is fetched once the first has returned at 2 s, and comes at 4 s
    assert estimate_step([2, 3], times, 0, [0, 1], 1) == max(4.0 + 1, 3.0) + 1 + 1 + 10
    assert (
        estimate_step([], step(4, 1.0, 3.0, 9.0), 0, [0, 1, 2, 3], 4) == 4 * 9 + 4 * 9
    )  # returned, then fetched again


def unit(numel: int = 100) -> UnitSize:
    return UnitSize(
        name="u", num_parameters=numel, weight_bytes=2 * numel, gradient_bytes=2 * numel, gpu_bytes=10 * numel,
        host_bytes=14 * numel, no_copy_bytes=12 * numel, streamed_bytes=10 * numel, shadow_bytes=12 * numel,
    )  # fmt: skip


def chosen(times: StepTimes | None, more_bytes: int = 0) -> Placement:
    """Returns the places of eight units, with room on the GPU for streamed state and as many bytes more."""
    units = [unit() for _ in range(8)]
    intervals = [MemoryInterval(unit=n, peak_bytes=4000 if n == 7 else 50) for n in reversed(range(8))]
    allowed = Limits(gpu_bytes=8 * 200 + 4000 + more_bytes, host_bytes=10**12, keeps_gradients=True)
    return choose_placement(units, intervals, allowed, 0, times)


def test_the_host_and_the_copies_end_together() -> None:
    assert chosen(None).places.count("visit") == 5  # at assumed rates a return takes 0.75 of an update
    assert chosen(step(8, 0.0, 1.0, 1.0, 0.0)).places.count("visit") == 2  # they are fetched again, too
    assert chosen(step(8, 0.0, 9.0, 0.1, 0.0)).places.count("visit") == 8
    assert chosen(step(8, 0.0, 1.0, 9.0, 0.0)).places.count("visit") == 0


def test_only_what_no_forward_hides_is_streamed() -> None:
    assert chosen(step(8, 1.0, 0.1, 0.1)).places == ("visit", *["host"] * 7)


def test_places_change_only_if_the_measured_times_ask_for_it(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lab.net()
    optimizer = lab.hybrid(model, clip_norm=1e9, gpu_units=0, speculate=False)
    lab.train(model, optimizer, range(2))
    optimizer.synchronize()
    placer = optimizer.scheduler.placer
    other = placed(optimizer, ["visit", *["host"] * (UNITS - 1)], {5: (0,)})
    monkeypatch.setattr(state_placer, "choose_placement", lambda *_: other)
    assert optimizer.plan.places == ("host",) * UNITS
    assert placer.better_plan(step(UNITS, 1.0, 0.1, 0.1)) is None  # the forward hides all
    plan = placer.better_plan(step(UNITS, 0.0, 1.0, 0.1, 0.0))
    assert plan is not None
    assert plan.reasons[-1] == (
        "by the measured times of passes, updates and copies, a step of 6 s becomes one of 5 s with other places"
    )
