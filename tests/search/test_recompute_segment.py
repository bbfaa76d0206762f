"""Recompute segments against plain loops over units, and the search for tight memory against a brute force."""

import random
from collections.abc import Iterator
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from pipedejavu.analysis import verify
from pipedejavu.facts import FaultsError, Machine, Profile
from pipedejavu.plan import Cut, Feed, Order, Place, Plan, Reduce
from pipedejavu.program import compile as compile_plan
from pipedejavu.search import SearchOptions, search
from pipedejavu.search.candidate_plan import Mode, PlanningProblem
from pipedejavu.search.recompute_segment import Segments, divide, units_only
from pipedejavu.search.slot import DeviceOrder, schedule_slot
from pipedejavu.search.stage_cost import StageCosts
from pipedejavu.simulate import simulate
from tests.search.case import machine, profile


def sizes(seed: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns random times and saved bytes of units, and bytes that cross boundaries, none above what is saved."""
    chance = np.random.default_rng(seed)
    saved = chance.integers(4, 40, count).astype(float)
    cut = np.concatenate([[0.0], np.minimum(saved[1:], chance.integers(1, 20, count - 1)), [0.0]])
    return chance.integers(1, 9, count).astype(float), saved, cut


def parts(segments: Segments, count: int, start: int, end: int) -> list[tuple[range, bool]]:
    """Returns the segments of a stage, and whether each is recomputed."""
    found: list[tuple[range, bool]] = []
    for unit in range(start, end):
        if unit == start or segments.first[unit] == unit:
            found.append((range(unit, unit + 1), bool(segments.rank[unit] < count)))
        else:
            found[-1] = range(found[-1][0].start, unit + 1), found[-1][1]
    return found


@pytest.mark.parametrize("seed", range(4))
def test_sums_over_segments_are_those_of_a_loop(seed: int) -> None:
    time, saved, cut = sizes(seed, 9)
    for segments in divide(time, saved, cut):
        for start, end in combinations(range(10), 2):
            for count in range(segments.most + 1):
                held = [(part, again) for part, again in parts(segments, count, start, end)]
                assert segments.time[count, end] - segments.time[count, start] == sum(
                    time[list(part)].sum() for part, again in held if again
                )
                kept = [cut[part.start] if again else saved[list(part)].sum() for part, again in held]
                assert segments.kept_bytes(count, np.array(start), np.array(end)) == sum(kept)
                runs = 1 + sum(one[1] or two[1] for one, two in pairwise(held))
                assert segments.num_pieces(np.array(count), np.array(start), np.array(end)) == runs


@pytest.mark.parametrize("seed", range(4))
def test_what_a_backward_adds_is_the_peak_over_segments(seed: int) -> None:
    time, saved, cut = sizes(seed, 9)
    for segments in divide(time, saved, cut):
        for start, end in combinations(range(10), 2):
            held = [part for part, _ in parts(segments, 0, start, end)]
            peaks = []
            for index, part in enumerate(held):
                later = [p for p in held[index + 1 :] if p.stop in (*segments.first, 9)]  # whole segments
                freed = sum(min(cut[p.start], saved[list(p)].sum()) for p in later)
                peaks.append(saved[list(part)].sum() + cut[part.start] + cut[part.stop] - freed)
            assert segments.extra[start, end] == pytest.approx(max(peaks) - cut[start] - cut[end])


def test_segments_are_as_short_as_asked_with_the_smallest_inputs() -> None:
    saved, cut = np.full(8, 10.0), np.array([0.0, 9, 9, 1, 9, 9, 2, 9, 0])
    divisions = divide(np.ones(8), saved, cut)
    assert [[*map(int, np.unique(d.first))] for d in divisions] == [[0], [0, 3, 6], [0, 2, 4, 6], [*range(8)]]
    assert [*units_only(np.ones(8), saved, cut).first] == [*range(8)]


def choices(segments: tuple[Segments, ...], start: int, end: int) -> Iterator[tuple[Segments, int]]:
    for division in segments:
        yield from ((division, count) for count in range(division.most + 1))


@pytest.mark.parametrize("seed", range(6))
def test_a_stage_recomputes_what_costs_least_of_all_that_fits(seed: int) -> None:
    time, saved, cut = sizes(seed, 8)
    model = profile([*time / 1e3], weights=0, saved=[*saved], boundary=[*cut[1:]])
    chance, mode, compared = random.Random(seed), Mode(recomputes=True), 0
    for _ in range(30):
        place = machine(["fast"] * 3, room=chance.randint(30, 400))
        problem = PlanningProblem(model, place, ("gpu0", "gpu1", "gpu2"))
        costs, order = StageCosts(problem, 1), DeviceOrder(problem, problem.devices, 1)
        start, end = sorted(chance.sample(range(9), 2))
        scheduled = schedule_slot(order.slot(chance.randint(0, 2), 1), 6, is_stale=False)
        segments = costs.segments(scheduled.slot.kinds, mode)
        around = 2 * (cut[start] + cut[end])
        limit = scheduled.slot.memory.device_bytes - around
        fitting = [
            division.time[count, end] - division.time[count, start]
            for division, count in choices(segments, start, end)
            if count
            and scheduled.live * division.kept_bytes(count, np.array(start), np.array(end)) + division.extra[start, end]
            <= limit
        ]
        if scheduled.live * saved[start:end].sum() <= limit:
            fitting.append(0.0)
        cost = costs.stage(start, end, scheduled, mode)
        assert bool(cost.fits) == bool(fitting)
        if fitting:
            again = costs.recompute(start, end, scheduled, mode)
            assert time[list(again.units)].sum() / 1e3 == pytest.approx(min(fitting))
            assert all(start < unit < end for unit in again.checkpoints)
            compared += 1
    assert compared > 5


# The whole search against all pipelines, each simulated.

LINK = 1e9


def pipelines(model: Profile, place: Machine, batch: int) -> Iterator[Plan]:
    """Yields every contiguous cut × replicas of each stage × recompute of each stage × microbatch size."""
    names, units = [device.name for device in place.devices], len(model.units)
    for stages, samples in product(range(1, len(names) + 1), (n for n in range(1, batch + 1) if batch % n == 0)):
        for bounds in combinations(range(1, units), stages - 1):
            for groups in product(range(1, len(names) + 1), repeat=stages):
                if sum(groups) > len(names) or max(groups) > batch // samples:
                    continue
                for mask in product((False, True), repeat=stages):
                    ends = (0, *bounds, units)
                    again = tuple(u for s, run in enumerate(pairwise(ends)) if mask[s] for u in range(*run))
                    yield Plan(
                        cut=Cut(kind="chain", bounds=bounds) if bounds else Cut(),
                        place=Place(workers=stages, stage_replicas=groups, devices=tuple(names[: sum(groups)])),
                        feed=Feed(microbatches=batch // samples, samples=samples),
                        order=Order(kind="1f1b", recompute_units=again or None),
                        reduce=Reduce(wire="all-reduce" if max(groups) > 1 else "none"),
                    )


def brute_force(model: Profile, place: Machine, batch: int) -> list[tuple[float, float]]:
    """Returns the simulated time and memory of every pipeline, the memory as the larger of two counts of it."""
    roomy = place.replace(devices=tuple(device.replace(memory_bytes=2**60) for device in place.devices))
    answers = []
    for plan in pipelines(model, roomy, batch):
        program = compile_plan(plan, model, roomy)
        prediction = simulate(program, verify(program))
        answers.append((prediction.makespan_s, max(peaks["device"] for peaks in prediction.peaks())))
    return answers


def tight_case(seed: int, devices: int) -> tuple[Profile, Machine]:
    chance = random.Random(seed)
    units = 5
    saved = [chance.choice([1, 2, 4, 8]) * 1e5 for _ in range(units)]
    model = profile(
        [chance.choice([1, 2, 3]) * 1e-3 for _ in range(units)],
        weights=[chance.choice([1, 10, 60]) * 1000 for _ in range(units)],
        saved=saved,
        boundary=[min(size, chance.choice([2e4, 2e5])) for size in saved],
    )
    return model, machine(["fast"] * devices, within=chance.choice([1e8, LINK]), room=2**60)


def assert_no_worse(model: Profile, place: Machine, batch: int, shares: tuple[float, ...]) -> None:
    answers = brute_force(model, place, batch)
    least = min(need for _, need in answers)
    for share in shares:
        limit = round(least * share)
        best_s = min(time for time, need in answers if need <= limit)
        devices = tuple(device.replace(memory_bytes=limit) for device in place.devices)
        best = search(model, place.replace(devices=devices), SearchOptions(batch=batch, is_runnable=True)).best
        assert best is not None, share
        assert best.time_s <= 1.01 * best_s, (share, best.plan)


@pytest.mark.parametrize("seed", range(3))
def test_in_tight_memory_the_search_is_no_worse_than_any_simulated_pipeline(seed: int) -> None:
    assert_no_worse(*tight_case(seed, 2), batch=6, shares=(1.0, 1.15, 1.5, 2.5, 100.0))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_in_tight_memory_the_search_is_no_worse_on_three_devices(seed: int) -> None:
    assert_no_worse(*tight_case(seed + 100, 3), batch=4, shares=(1.15, 1.3, 1.5, 2.0, 2.5, 100.0))


def test_a_plan_with_checkpoints_runs_in_the_memory_that_it_was_made_for() -> None:
    # One device holds the inputs of a few segments and what one of them saves, not what all save.
    model = profile([1e-3] * 12, saved=1000.0, boundary=10.0, weights=1)
    best = search(model, machine(["fast"], room=4300), SearchOptions(batch=1, is_runnable=True)).best
    assert best is not None
    assert best.plan.order.checkpoints is not None
    assert best.memory[0].need_bytes <= 4300
    assert best.time_s == pytest.approx(12 * 3e-3 + len(best.plan.order.recompute_units or ()) * 1e-3)
    with pytest.raises(FaultsError, match="would need 11"):
        verify(
            compile_plan(
                best.plan.replace(order=best.plan.order.replace(recompute_units=None, checkpoints=None)),
                model,
                best.machine,
            )
        )
