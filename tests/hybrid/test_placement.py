from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pipedejavu.facts import InputError
from pipedejavu.hybrid.placement import (
    Limits,
    MemoryInterval,
    Place,
    Placement,
    UnitSize,
    choose_placement,
    estimate_placement,
    free_for_leaving,
    gpu_peak,
    host_bytes,
)
from pipedejavu.hybrid.shadow_choice import wants_shadows, with_shadows

LARGE = 10**12


def unit(numel: int, *, is_windowed: bool = False) -> UnitSize:
    """Returns the sizes of a unit of bf16 parameters."""
    return UnitSize(
        name="u", num_parameters=numel, weight_bytes=0 if is_windowed else 2 * numel, gradient_bytes=2 * numel,
        gpu_bytes=10 * numel, host_bytes=14 * numel, no_copy_bytes=12 * numel, streamed_bytes=10 * numel,
        shadow_bytes=12 * numel, is_bound_to_host=is_windowed,
    )  # fmt: skip


def stretches_of(peaks: Sequence[int]) -> list[MemoryInterval]:
    """Returns the intervals of a backward pass: the last unit's ends first."""
    return [MemoryInterval(unit=n, peak_bytes=peaks[n]) for n in reversed(range(len(peaks)))]


def limits(gpu: int, host: int = LARGE, *, keeps: bool = True, first: int | None = None) -> Limits:
    return Limits(gpu_bytes=gpu, host_bytes=host, keeps_gradients=keeps, num_first=first)


FOUR = [unit(100) for _ in range(4)]
STEP = stretches_of([50, 50, 50, 50])
LEAST = 4 * 200 + 50 + 200
"""Weights, a backward, and the gradients of the unit before, which are on their way to the host."""


def test_all_state_lies_on_the_gpu_where_it_fits() -> None:
    placed = choose_placement(FOUR, STEP, limits(LARGE))
    assert placed.places == ("gpu",) * 4
    assert placed.host_bytes == 0
    # weights 200 and state 1000 of each unit, 200 of each gradient once it is there; at the end all gradients
    assert placed.gpu_bytes == 4 * 1200 + 4 * 200
    assert placed.reasons == (
        "the state of 4 of 4 units (400 of 400 parameters) rests on the GPU, as many as the GPU's budget holds:"
        " 5.5 KiB of 931.3 GiB",
    )


def test_the_first_units_are_on_the_gpu_and_the_last_on_the_host() -> None:
    placed = choose_placement(FOUR, STEP, limits(2 * 1200 + 2 * 200 + 2 * 200 + 60))
    assert placed.places == ("gpu", "gpu", "host", "host")
    assert placed.host_bytes == 2 * 1400
    assert placed.gpu_bytes == 2 * 1200 + 2 * 200 + 2 * 200
    assert placed.reasons[1] == "the rest is in host memory: 2.7 KiB of 931.3 GiB"


def test_the_number_of_units_on_the_gpu_can_be_given() -> None:
    for count in range(5):
        placed = choose_placement(FOUR, STEP, limits(LARGE, first=count))
        assert placed.places[:count] == ("gpu",) * count
        assert "gpu" not in placed.places[count:]
        assert "as asked" in placed.reasons[0]


def test_streamed_state_uses_memory_that_the_backward_pass_has_freed() -> None:
    peaks = stretches_of([50, 50, 50, 5000])
    placed = choose_placement(FOUR, peaks, limits(4 * 200 + 5000))
    assert placed.places == ("visit", "visit", "host", "host")
    assert placed.arrivals == {3: (0, 1)}
    assert placed.host_bytes == 2 * 1000 + 2 * 1400
    assert placed.reasons[2] == (
        "the state of 2 units is streamed to the GPU for its update, into memory that the backward pass has freed"
    )


def test_state_fetched_in_the_backward_pass_is_that_of_the_first_units_of_its_size() -> None:
    units = [unit(120), *(unit(100) for _ in range(11))]
    step = stretches_of([50] * 11 + [4000])
    placed = choose_placement(units, step, limits(10_880))
    assert placed.places == ("gpu", *["visit"] * 2, *["gpu"] * 3, *["visit"] * 3, *["host"] * 3)
    assert placed.arrivals == {11: (1, 2)}  # the others come when these have left
    assert choose_placement(units, step, limits(10_880, first=3)).places[:3] == ("gpu",) * 3


def test_no_state_is_streamed_if_updates_do_not_wait_for_the_end() -> None:
    placed = choose_placement(FOUR, stretches_of([50, 50, 50, 5000]), limits(4 * 200 + 5000, keeps=False))
    assert placed.places == ("host",) * 4
    assert placed.arrivals == {}


def test_as_few_units_as_needed_have_no_host_copy() -> None:
    gpu = LEAST
    whole = choose_placement(FOUR, STEP, limits(gpu))
    assert whole.host_bytes == 4 * 1400
    # three lean units save 200 each and need 2 × 200 of room for their weights
    placed = choose_placement(FOUR, STEP, limits(gpu, 4 * 1400 - 200))
    assert placed.places == ("host", "lean", "lean", "lean")
    assert placed.host_bytes == 1400 + 3 * 1200 + 400
    assert placed.reasons[-1] == "3 units keep no copy of their weights on the host, which could not hold them"


def test_a_model_too_large_for_the_gpu_is_refused_with_the_smallest_budget_that_would_do() -> None:
    text = (
        r"^the model needs 1\.0 KiB of GPU memory and the budget is 1\.0 KiB; the smallest gpu_budget that would do is"
        r" 1050 bytes; or give a window$"
    )
    with pytest.raises(InputError, match=text):
        choose_placement(FOUR, STEP, limits(LEAST - 1))
    assert choose_placement(FOUR, STEP, limits(LEAST)).places == ("host",) * 4


def test_too_many_units_asked_for_are_refused() -> None:
    least = 4 * 200 + 2 * 1000 + 400
    text = (
        rf"^the model needs 3\.1 KiB of GPU memory and the budget is 3\.1 KiB; {least} bytes would do, or fewer units"
    )
    with pytest.raises(InputError, match=text):
        choose_placement(FOUR, STEP, limits(least - 1, first=2))
    choose_placement(FOUR, STEP, limits(least, first=2))


def test_a_host_too_small_is_refused_with_both_remedies() -> None:
    least = 4 * 1200 + 400
    most_gpu = 4 * 1200 + 4 * 200
    text = (
        rf"^the state that the GPU cannot hold needs 5\.1 KiB of host memory and the budget is 5\.1 KiB; a host_budget"
        rf" of {least} bytes would do, or a gpu_budget of {most_gpu} bytes, which would hold all of it$"
    )
    with pytest.raises(InputError, match=text):
        choose_placement(FOUR, STEP, limits(LEAST, least - 1))
    assert choose_placement(FOUR, STEP, limits(LEAST, least)).host_bytes == least
    assert choose_placement(FOUR, STEP, limits(most_gpu, 1)).places == ("gpu",) * 4


def test_gradients_on_their_way_to_the_host_have_room_until_the_next_unit_is_done() -> None:
    units = [unit(100), unit(300), unit(10), unit(100)]
    places: list[Place] = ["gpu", "host", "host", "host"]
    resting = 2 * 510 + 1000
    # in backward order: after the third unit the 200 bytes of the first have left; at last 600 are on their way
    assert gpu_peak(units, stretches_of([0, 0, 0, 50]), places, keeps_gradients=True) == resting + 600
    assert gpu_peak(units, stretches_of([0, 0, 450, 0]), places, keeps_gradients=True) == resting + 200 + 450
    assert gpu_peak(units, stretches_of([0, 650, 0, 0]), places, keeps_gradients=True) == resting + 20 + 650


def test_gradients_of_more_units_may_be_on_their_way_below_the_peak() -> None:
    placed = choose_placement(FOUR, stretches_of([50, 50, 400, 700]), limits(4 * 200 + 700))
    assert placed.places == ("host",) * 4
    # after the last unit 400 bytes and its own gradients' 200 come next to the weights, then 50 and 200, twice
    room = free_for_leaving(FOUR, placed, stretches_of([50, 50, 400, 700]), keeps_gradients=True)
    assert room == {3: 700 - 400 - 200, 2: 700 - 50 - 200, 1: 700 - 50 - 200, 0: 700 - 200}


def test_streamed_state_takes_memory_from_leaving_gradients() -> None:
    units, intervals = [unit(10), unit(100), unit(100)], stretches_of([0, 0, 1000])
    placed = choose_placement(units, intervals, limits(2 * 210 + 1000))
    assert placed.places == ("visit", "host", "host")
    assert placed.arrivals == {2: (0,)}
    room = free_for_leaving(units, placed, intervals, keeps_gradients=True)
    assert room == {2: 1000 - 100 - 200, 1: 1000 - 100 - 200, 0: 1000 - 100 - 20}


def test_blocks_that_come_and_go_stay_with_the_host() -> None:
    units = [unit(10), unit(100, is_windowed=True), unit(100, is_windowed=True), unit(10)]
    placed = choose_placement(units, STEP, limits(LARGE))
    assert placed.places == ("gpu", "host", "host", "gpu")
    with pytest.raises(InputError, match=r"host memory and the budget is 2\.7 KiB; a host_budget of 2800 bytes"):
        choose_placement(units, STEP, limits(LARGE, 2799))


def test_spares_go_as_far_as_host_memory() -> None:
    placed = choose_placement(FOUR, STEP, limits(LEAST))
    assert with_shadows(placed, FOUR, [False] * 4, LARGE) is placed
    assert with_shadows(placed, FOUR, [True] * 4, placed.host_bytes) is placed
    more = with_shadows(placed, FOUR, [False, True, True, True], placed.host_bytes + 2 * 1200 + 100)
    assert more.has_shadow == (False, True, True, False)
    assert more.host_bytes == placed.host_bytes + 2 * 1200
    assert more.reasons[-1].startswith("2 units have a shadow copy of their state (2.3 KiB): their update is written")


@pytest.mark.parametrize(
    ("host_s", "forward_s", "wanted"),
    [
        ([0, 1, 1, 1], [9, 9, 9, 9], [False, False, False, False]),  # the forward hides all
        ([0, 1, 1, 1], [0, 0, 0, 0], [False, True, True, True]),  # and here nothing
        ([0, 1, 1, 1], [1, 0, 1, 0], [False, True, False, False]),  # units 2 and 3 end at 1 and 2, as they are needed
    ],
)
def test_shadows_are_wanted_if_the_forward_is_too_short(
    host_s: list[float], forward_s: list[float], wanted: list[bool]
) -> None:
    places: list[Place] = ["gpu", "host", "host", "host"]
    assert wants_shadows(places, host_s, forward_s) == wanted


Model = tuple[list[UnitSize], list[MemoryInterval]]


@st.composite
def models(draw: st.DrawFn) -> Model:
    count = draw(st.integers(1, 7))
    units = [unit(draw(st.integers(1, 300)), is_windowed=draw(st.integers(0, 5)) == 0) for _ in range(count)]
    return units, stretches_of([draw(st.integers(0, 4000)) for _ in range(count)])


def chosen(model: Model, allowed: Limits) -> Placement | None:
    try:
        return choose_placement(*model, allowed)
    except InputError:
        return None


BUDGETS = st.integers(0, 12_000)


def least_of(model: Model, keeps: bool = True) -> int:
    """Returns the GPU memory that a model needs with all state on the host."""
    return gpu_peak(*model, ["host"] * len(model[0]), keeps)


@given(models(), BUDGETS, BUDGETS, st.booleans())
def test_budgets_are_respected(model: Model, more_gpu: int, host: int, keeps: bool) -> None:
    units, intervals = model
    gpu = least_of(model, keeps) + more_gpu
    placed = chosen(model, limits(gpu, host, keeps=keeps))
    if placed is None:
        return
    assert placed.gpu_bytes <= gpu
    assert placed.host_bytes <= host
    assert placed.host_bytes == host_bytes(units, placed.places)
    assert placed.gpu_bytes >= gpu_peak(units, intervals, placed.places, keeps)
    for size, place in zip(units, placed.places, strict=True):
        assert place == "host" or not size.is_bound_to_host
    on_gpu = [place == "gpu" for size, place in zip(units, placed.places, strict=True) if not size.is_bound_to_host]
    assert on_gpu == sorted(on_gpu, reverse=True)


@given(models(), BUDGETS)
def test_streamed_state_never_exceeds_the_limit(model: Model, more_gpu: int) -> None:
    units, intervals = model
    gpu = least_of(model) + more_gpu
    placed = choose_placement(units, intervals, limits(gpu))
    held = list(zip(units, placed.places, strict=True))
    resting = sum(u.weight_bytes + (u.gpu_bytes if place == "gpu" else 0) for u, place in held)
    kept = here = 0
    came: list[int] = []
    for interval in intervals:
        assert resting + kept + here + interval.peak_bytes <= gpu
        if placed.places[interval.unit] in ("gpu", "visit"):
            kept += units[interval.unit].gradient_bytes
        coming = placed.arrivals.get(interval.unit, ())
        here += sum(units[n].streamed_bytes for n in coming)
        came += coming
        leaving = max(0, free_for_leaving(units, placed, intervals, keeps_gradients=True)[interval.unit])
        assert resting + kept + here + leaving <= gpu
    assert resting + kept + here <= gpu
    streamed = [n for n, place in enumerate(placed.places) if place == "visit"]
    assert came == streamed[: len(came)]  # the others are fetched when these have been returned
    updated_there: list[Place] = ["host" if place == "visit" else place for place in placed.places]
    without = replace(placed, places=tuple(updated_there), arrivals={})
    assert estimate_placement(placed, units, None) <= estimate_placement(without, units, None)


@given(models(), BUDGETS, BUDGETS, BUDGETS, BUDGETS, st.booleans())
def test_more_budget_never_places_fewer_units_on_the_gpu(
    model: Model, more_gpu: int, host: int, still_more_gpu: int, more_host: int, keeps: bool
) -> None:
    gpu = least_of(model, keeps) + more_gpu
    small = chosen(model, limits(gpu, host, keeps=keeps))
    if small is not None:
        large = choose_placement(*model, limits(gpu + still_more_gpu, host + more_host, keeps=keeps))
        assert large.places.count("gpu") >= small.places.count("gpu")


@given(models(), BUDGETS, st.booleans())
def test_the_smallest_gpu_budget_of_a_refusal_does(model: Model, gpu: int, keeps: bool) -> None:
    least = least_of(model, keeps)
    if gpu >= least:
        choose_placement(*model, limits(gpu, keeps=keeps))
    else:
        with pytest.raises(InputError, match=f"the smallest gpu_budget that would do is {least} bytes"):
            choose_placement(*model, limits(gpu, keeps=keeps))


@given(models(), BUDGETS, st.floats(0, 1))
def test_the_host_budget_of_a_refusal_does(model: Model, more_gpu: int, share: float) -> None:
    units, _ = model
    allowed = limits(least_of(model) + more_gpu, int(share * sum(size.no_copy_bytes for size in units)))
    try:
        choose_placement(*model, allowed)
    except InputError as refused:
        needed = int(str(refused).split("a host_budget of ")[1].split(" bytes")[0])
        assert choose_placement(*model, replace(allowed, host_bytes=needed)).host_bytes == needed
        assert chosen(model, replace(allowed, host_bytes=needed - 1)) is None
