"""Questions whose answers are known."""

from itertools import pairwise

import pytest

from pipedejavu.analysis import verify
from pipedejavu.facts import InputError, Profile
from pipedejavu.program import compile as compile_plan
from pipedejavu.search import SearchOptions, search
from pipedejavu.simulate import simulate
from tests.search.case import machine, profile


def test_every_candidate_compiles_verifies_and_simulates_as_it_says() -> None:
    result = search(profile([1e-3] * 6), machine(["fast"] * 4), SearchOptions(batch=8))
    assert len(result.candidates) > 1
    assert result.is_complete
    for ranked in result.candidates:
        program = compile_plan(ranked.plan, ranked.profile, ranked.machine)
        assert simulate(program, verify(program)).makespan_s == pytest.approx(ranked.time_s)
        assert all(need.share <= 1 for need in ranked.memory)
    times = [c.time_s for c in result.candidates]
    assert times[0] <= 1.01 * min(times)
    assert all(b >= a for a, b in pairwise(times) if a > 1.01 * min(times))


def test_with_infinite_bandwidth_and_memory_data_parallel_wins() -> None:
    result = search(profile([1e-3, 3e-3, 2e-3]), machine(["fast"] * 4), SearchOptions(batch=8, is_runnable=True))
    assert result.best is not None
    assert result.best.plan.place.replicas == 4
    assert result.best.time_s == pytest.approx(2 * 18e-3)  # a quarter of the batch, forward and backward


def test_of_equally_fast_plans_the_one_that_needs_less_memory_comes_first() -> None:
    # Nothing is fixed, so that microbatches of any size take as long; smaller ones save less at a time.
    ranked = search(profile([1e-3] * 3, saved=100.0), machine(["fast"]), SearchOptions(batch=8, is_runnable=True)).best
    assert ranked is not None
    assert (ranked.plan.feed.microbatches, ranked.plan.feed.samples) == (8, 1)
    assert ranked.time_s == pytest.approx(8 * 9e-3)


def test_a_profile_without_times_on_the_machine_is_refused() -> None:
    with pytest.raises(InputError, match="has no times on 'slow', the devices of machine 'test'; profile the model"):
        search(profile([1e-3]), machine(["slow"]))


def test_more_devices_than_can_be_compared_are_refused() -> None:
    with pytest.raises(
        InputError, match="has 8,193 devices to train on, and a plan can be looked for on 8,192 at most"
    ):
        search(profile([1e-3]), machine(["fast"] * 8193))


@pytest.mark.parametrize("batch", [10**12, 10**12 + 39])  # many divisors, and a prime
def test_batches_of_any_size_are_planned(batch: int) -> None:
    model = profile([1e-3] * 4, {"fast": 1.0, "half": 0.5})
    result = search(model, machine(["fast", "half"]), SearchOptions(batch=batch, is_runnable=True))
    assert result.best is not None
    assert result.best.samples == batch
    # Either device alone, or both with two thirds of each microbatch's work on the faster: 12 ms a sample.
    assert batch * 8e-3 <= result.best.time_s <= batch * 12e-3 * (1 + 1e-9)


def test_options_that_disagree_are_refused() -> None:
    with pytest.raises(InputError, match="microbatches of 3 samples do not make up a batch of 8"):
        search(profile([1e-3]), machine(["fast"]), SearchOptions(batch=8, samples=3))
    with pytest.raises(InputError, match="objective 'price' needs the price"):
        search(profile([1e-3]), machine(["fast"]), SearchOptions(objective="price"))


def halved(model: Profile) -> Profile:
    """The profile with the weight half of each backward apart, as long as the forward."""
    units = [
        u.replace(times={k: t.replace(weight_backward=t.forward) for k, t in u.times.items()}) for u in model.units
    ]
    return model.replace(units=tuple(units))


def orders(model: Profile, gpus: int, batch: int) -> dict[str, float]:
    """The times of all plans on GPUs between which gradients are too large to be added up, by their order."""
    asked = SearchOptions(batch=batch, samples=1, is_runnable=True, candidates=9)
    result = search(model, machine(["fast"] * gpus, within=1e9), asked)
    fastest: dict[str, float] = {}
    for c in result.candidates:
        fastest[c.plan.order.kind] = min(c.time_s, fastest.get(c.plan.order.kind, c.time_s))
    return fastest


def test_other_orders_are_simulated_beside_the_best_pipeline() -> None:
    # A stage takes 4 ms forward, and 4 and 4 backward. Bubbles, in units of these: 1F1B 3·(1 + 2), interleaved a
    # fourth of that with four chunks per worker, ZB-H1 3, and ZB-V and DualPipeV half of that: half as long chunks.
    kinds = orders(halved(heavy(16)), 4, 8)
    assert kinds["1f1b"] == pytest.approx((8 * 3 + 9) * 4e-3, rel=1e-3)
    assert kinds["zb-h1"] == pytest.approx((8 * 3 + 3) * 4e-3, rel=1e-3)
    assert kinds["zb-v"] == pytest.approx((8 * 3 + 1.5) * 4e-3, rel=1e-3)
    assert kinds["dualpipe-v"] == pytest.approx(kinds["zb-v"], rel=1e-3)
    assert kinds["interleaved"] == pytest.approx((8 * 3 + 9 / 4) * 4e-3, rel=1e-3)


def test_orders_that_cannot_pay_are_not_simulated() -> None:
    # Without halves of the backward there is nothing to move, and five microbatches are no multiple of four stages.
    assert orders(heavy(16), 4, 5).keys() <= {"step", "1f1b"}
    # With many microbatches the bubble is small.
    assert not orders(halved(heavy(8)), 2, 32).keys() & {"zb-v", "dualpipe-v"}


def heavy(count: int) -> Profile:
    return profile([1e-3] * count, weights=10**9, boundary=1.0)


@pytest.mark.parametrize(("staleness", "count"), [(1, None), (2, 2), (3, 1)])
def test_older_weights_allow_fewer_and_larger_microbatches(staleness: int, count: int | None) -> None:
    # A forward takes 2 ms however small it is; four stages of two units are three updates of one microbatch ahead.
    units = (
        u.replace(times={k: t.replace(forward=t.forward.replace(fixed_s=2e-3)) for k, t in u.times.items()})
        for u in heavy(8).units
    )
    model, place = heavy(8).replace(units=tuple(units)), machine(["fast"] * 4, within=1e9)
    options = SearchOptions(batch=8, staleness=staleness, correction="none", is_runnable=True)
    ranked = search(model, place, options).best
    assert ranked is not None
    if count is None:
        assert ranked.plan.version.kind == "double-buffer"
        assert ranked.time_s == pytest.approx(4 * (4e-3 + 2 * 6e-3), rel=1e-3)  # four of two samples
    else:
        assert ranked.plan.version.kind == "stash"
        assert ranked.plan.feed.microbatches == count
        assert ranked.time_s == pytest.approx(count * 4e-3 + 8 * 6e-3, rel=1e-3)
        versions = simulate(compile_plan(ranked.plan, model, place)).workers[0].weight_versions
        assert versions == 1 + -(-3 // count)


def test_plans_carry_where_their_units_begin() -> None:
    model = profile([1e-3] * 8, weights=10**9, boundary=1.0).replace(begins=(*range(2, 16, 2), 20))
    result = search(model, machine(["fast"] * 2, within=1e9), SearchOptions(batch=8, is_runnable=True))
    assert {c.plan.order.kind for c in result.candidates} >= {"1f1b", "interleaved"}
    assert {c.plan.cut.begins for c in result.candidates} == {model.begins}


def test_where_nothing_fits_all_devices_are_looked_at_by_a_searcher_for_so_many() -> None:
    # A device that is a thousand times slower is left out at first; with it there are all the cuts of two stages.
    model = profile([1e-3] * 60, {"fast": 1.0, "tenth": 1e-3}, weights=10**6)
    result = search(model, machine(["fast", "tenth"], room=10**6), SearchOptions(batch=8, is_runnable=True))
    assert not result.candidates
    assert (result.searcher, result.num_simulated) == ("dp", 0)


def test_of_plans_that_cost_the_same_the_simplest_comes_first() -> None:
    model = profile([1e-3] * 4, update_s=1e-3)
    units = [u.replace(times=u.times | {"cpu": u.times["fast"].times(4).replace(update_s=1e-6)}) for u in model.units]
    place = machine(["fast"], host_room=10**9)
    options = SearchOptions(batch=64, objective="price", prices={"fast": 1.0, "cpu": 1.0}, is_runnable=True)
    result = search(model.replace(units=tuple(units)), place, options)
    assert result.best is not None
    assert result.best.plan.keep.kind == "replicated"
    assert result.best.price > min(c.price for c in result.candidates)  # a host would save some of the update


def test_the_simplest_comes_first_among_the_slower_plans_too() -> None:
    # Shares of two devices are a tenth faster than the fast one alone, where a host would save some of the update.
    model = profile([1e-3] * 4, {"fast": 1.0, "tenth": 0.1}, update_s=5e-4)
    units = [u.replace(times=u.times | {"cpu": u.times["fast"].times(1e4).replace(update_s=1e-6)}) for u in model.units]
    place = machine(["fast", "tenth"], host_room=10**9)
    result = search(model.replace(units=tuple(units)), place, SearchOptions(batch=64, is_runnable=True, candidates=9))
    alone = [c for c in result.candidates if c.plan.num_workers == 1]
    assert result.best is not None
    assert 1.05 * result.best.time_s < min(c.time_s for c in alone)
    assert alone[0].plan.keep.kind == "replicated"
    assert min(c.time_s for c in alone) < alone[0].time_s < 1.01 * min(c.time_s for c in alone)


def test_the_least_price_may_leave_devices_out() -> None:
    model = profile([1e-3] * 4, {"fast": 1.0, "half": 0.5})
    place, prices = machine(["fast", "half"]), {"fast": 1.0, "half": 3.0}
    cheap = search(model, place, SearchOptions(batch=8, objective="price", prices=prices, is_runnable=True)).best
    assert cheap is not None
    assert cheap.plan.num_workers == 1
    assert cheap.price == pytest.approx(1.0 * cheap.time_s / 3600)
    quick = search(model, place, SearchOptions(batch=8, prices=prices, is_runnable=True)).best
    assert quick is not None
    assert quick.time_s < cheap.time_s
    assert quick.price > cheap.price


def test_progress_is_told_and_ends() -> None:
    told: list[float] = []
    search(profile([1e-3] * 8), machine(["fast"] * 4), SearchOptions(batch=8), lambda share, _: told.append(share))
    assert told[-1] == 1.0
    assert all(0 <= share <= 1 for share in told)


def test_stale_plans_come_only_where_they_are_allowed() -> None:
    model, place = profile([1e-3] * 8, weights=10**9, boundary=1.0), machine(["fast"] * 2, within=1e9)
    for staleness in (0, 1):
        result = search(model, place, SearchOptions(batch=8, staleness=staleness, is_runnable=True, candidates=8))
        versions = {c.plan.version.kind for c in result.candidates}
        assert ("double-buffer" in versions) == bool(staleness)
