"""What to buy or change: every gain is checked against a search of its own."""

import pytest

from pipedejavu.facts import Profile
from pipedejavu.search import SearchOptions, advise, leaner_plans, nothing_fits, search, smallest_change
from tests.search.case import machine, profile

GIB = 2**30


def hungry() -> Profile:
    """Four units of 1 GiB of weights (4 GiB with gradients and state) that save 0.25 GiB a sample."""
    return profile([1e-3] * 4, weights=GIB, saved=GIB / 4, boundary=1e6)


def with_tensors(model: Profile) -> Profile:
    """Returns a profile that knows its tensors: seven of weights and three of activations in each unit."""
    units = []
    for unit in model.units:
        parts = (unit.parameter_bytes // 7,) * 7
        units.append(unit.replace(parameter_parts=parts, activation_parts=(unit.activation_bytes / 3,) * 3))
    return model.replace(units=tuple(units))


@pytest.mark.parametrize("model", [hungry(), with_tensors(hungry())], ids=["live", "reserved"])
def test_more_memory_is_advised_where_memory_costs_time(model: Profile) -> None:
    # One device: 16 GiB of state and 8 GiB of activations; with room for 20 GiB something must be recomputed.
    here = machine(["fast"], room=20 * GIB)
    options = SearchOptions(batch=8, samples=8, is_runnable=True)
    best = search(model, here, options).best
    assert best is not None
    advice = {a.change: a for a in advise(model, here, options, best).found}
    (text,) = [change for change in advice if "memory" in change]
    assert text.endswith(" more memory on the fast")
    roomy = search(model, machine(["fast"]), options).best
    assert roomy is not None
    assert advice[text].time_s == roomy.time_s
    assert advice[text].gain == best.time_s / roomy.time_s > 1


def test_memory_is_not_advised_where_there_is_enough() -> None:
    options = SearchOptions(batch=8, is_runnable=True)
    best = search(hungry(), machine(["fast"]), options).best
    assert best is not None
    assert not [a for a in advise(hungry(), machine(["fast"]), options, best).found if "memory" in a.change]


def test_advice_does_not_depend_on_who_found_the_plan() -> None:
    model, options = profile([1e-3] * 4), SearchOptions(batch=8, is_runnable=True)
    here = machine(["fast", "slow"])
    best = search(model, here, options).best
    assert best is not None
    expected = advise(model, here, options, best)
    assert advise(model, here, options.replace(searcher="mcmc"), best) == expected
    worse = best.replace(time_s=2 * best.time_s)
    assert advise(model, here, options.replace(searcher="exhaustive"), worse) == expected


def test_changes_for_which_there_is_no_time_are_named() -> None:
    model, options = profile([1e-3] * 4), SearchOptions(batch=8, is_runnable=True)
    best = search(model, machine(["fast"]), options).best
    assert best is not None
    told: list[float] = []
    advice, left = advise(model, machine(["fast"]), options, best, time_budget_s=0.0)
    assert not advice
    assert left[-2:] == ("one more fast", "more memory on the fast")
    assert not advise(model, machine(["fast"]), options, best, lambda share, _: told.append(share)).left
    assert told == sorted(told)
    assert len({*told}) > len(left)  # it moves within a change, too


def test_a_search_for_better_plans_only_finds_those() -> None:
    model, here, options = profile([1e-3] * 4), machine(["fast"] * 2), SearchOptions(batch=8, is_runnable=True)
    best = search(model, here, options).best
    assert best is not None
    assert not search(model, here, options, max_score=0.9 * best.estimated_s).candidates
    again = search(model, here, options, max_score=1.1 * best.estimated_s)
    assert again.best == best
    assert all(ranked.estimated_s <= 1.1 * best.estimated_s for ranked in again.candidates)


def test_another_device_is_advised_with_its_gain() -> None:
    model = profile([1e-3] * 4)
    options = SearchOptions(batch=8, is_runnable=True)
    best = search(model, machine(["fast"]), options).best
    assert best is not None
    first = advise(model, machine(["fast"]), options, best).found[0]
    assert first.change == "one more fast"
    two = search(model, machine(["fast", "fast"]), options).best
    assert two is not None
    assert first.time_s == pytest.approx(two.time_s, rel=1e-9)


def test_the_smallest_change_fits_and_less_does_not() -> None:
    model, options = hungry(), SearchOptions(batch=1, is_runnable=True)
    here = machine(["fast", "fast"], room=4 * GIB)
    assert not search(model, here, options).candidates
    text = smallest_change(model, here, options)
    number, unit = text.split()[:2]
    assert (unit, text.partition(unit)[2]) == ("GiB", " more memory on each fast")
    extra = float(number)
    assert search(model, machine(["fast", "fast"], room=round((4 + extra + 0.05) * GIB)), options).candidates
    assert not search(model, machine(["fast", "fast"], room=round((4 + 0.9 * extra) * GIB)), options).candidates


def test_a_search_without_time_says_so_and_not_that_nothing_fits() -> None:
    fault = nothing_fits(hungry(), machine(["fast"]), SearchOptions(batch=8, time_budget_s=2.0), is_complete=False)
    assert str(fault) == (
        "no plan for test with a batch of 8 was found on machine 'test' in 2 s, and not all were looked at; give"
        " more time (--time-budget) or fewer devices"
    )


def test_a_smaller_batch_comes_first() -> None:
    # Two units, 8 GiB of state; microbatches of 8 samples save 4 GiB.
    model = profile([1e-3] * 2, weights=GIB, saved=GIB / 4, boundary=GIB / 4)
    here = machine(["fast"], room=10 * GIB)
    options = SearchOptions(batch=8, samples=8, is_runnable=True)
    assert not search(model, here, options).candidates
    text = smallest_change(model, here, options)
    assert text.startswith("microbatches of another size (leave --samples out), or ")


def test_leaner_plans_need_less_and_take_longer() -> None:
    model, here = hungry(), machine(["fast"] * 4, room=40 * GIB)
    options = SearchOptions(batch=8, is_runnable=True)
    best = search(model, here, options).best
    assert best is not None
    row = [best, *leaner_plans(model, here, options, best)]
    assert len(row) > 2
    shares = [candidate.fullest_share for candidate in row]
    assert shares == sorted(shares, reverse=True)
    assert all(need.room_bytes == 40 * GIB for need in best.memory)
    assert all(abs(need.room_bytes - 40 * GIB) < 100 for candidate in row for need in candidate.memory)
    assert row[-1].time_s > best.time_s
