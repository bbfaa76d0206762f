"""Stale plans with a correction: when one is taken, what it costs, and what is said about it."""

from math import inf
from pathlib import Path

import pytest

from pipedejavu.facts import InputError, Profile
from pipedejavu.plan import Version
from pipedejavu.search import SearchOptions, price_of_staleness, search
from pipedejavu.search.correction_choice import GivenUp
from pipedejavu.search.study_accuracy import LostAccuracy, accuracy_study, staleness_of
from tests.search.case import machine, profile

PLACE = machine(["fast"] * 4, within=1e9)


def model(update_s: float = 2e-3) -> Profile:
    return profile([1e-3] * 8, weights=10**8, boundary=1.0, update_s=update_s)


def options(**changes: object) -> SearchOptions:
    return SearchOptions.model_validate({"batch": 8, "staleness": 3, "is_runnable": True, **changes})


def test_the_form_that_lost_least_in_the_study_is_taken_with_its_cost_in_time_and_memory() -> None:
    result = search(model(), PLACE, options())
    best, (plain, *_) = result.candidates[0], [c for c in result.candidates if c.plan.version == Version(kind="stash")]
    assert best.plan.version == Version(kind="stash", correction="weight-prediction")
    assert accuracy_study().lost(best.plan) < accuracy_study().lost(plain.plan) < inf
    # Two units a stage: a forward takes three, and an update four, sevenths of an update longer.
    assert best.time_s - plain.time_s == pytest.approx(2 * 2e-3)
    # Three stashed versions go; a velocity and four predicted copies come.
    assert best.memory[0].need_bytes - plain.memory[0].need_bytes == pytest.approx(2 * 2 * 10**8, rel=0.01)
    exact = [c for c in result.candidates if not c.plan.is_flush_free]
    assert exact
    assert best.time_s < exact[0].time_s


def test_a_correction_that_takes_longer_than_an_exact_plan_is_left_out() -> None:
    result = search(model(), PLACE, options(staleness=1, candidates=9))  # each of eight microbatches is predicted
    first, exact = result.candidates[0], next(c for c in result.candidates if not c.plan.is_flush_free)
    assert first.plan.version.correction == "none"
    assert first.plan.is_flush_free
    corrected = next(c for c in result.candidates if c.plan.version.correction == "weight-prediction")
    assert first.time_s < exact.time_s < corrected.time_s


@pytest.mark.parametrize("asked", ["none", "discrepancy", "delay-compensation", "rates"])
def test_a_correction_that_is_asked_for_is_the_only_one(asked: str) -> None:
    stale = [c.plan.version for c in search(model(), PLACE, options(correction=asked)).candidates]
    stale = [version for version in stale if version.kind != "sync"]
    assert stale
    named = "none" if asked == "rates" else asked
    assert {(v.correction, v.rate_updates > 0) for v in stale} == {(named, asked == "rates")}


def test_a_correction_needs_stale_weights() -> None:
    with pytest.raises(InputError, match="correction 'discrepancy' restores what stale weights cost, and none may be"):
        search(model(), PLACE, options(staleness=0, correction="discrepancy"))
    assert all(c.plan.version.kind == "sync" for c in search(model(), PLACE, options(staleness=0)).candidates)


def test_what_a_stale_plan_gives_up_is_said_in_a_sentence() -> None:
    best = search(model(), PLACE, options()).best
    assert best is not None
    given = price_of_staleness(model(), PLACE, options(), best)
    assert given is not None
    (first, *_) = accuracy_study().of(best.plan)
    exact = search(model(), PLACE, options(staleness=0)).best
    assert exact is not None
    assert (given.exact, given.staleness) == (exact.plan.name, 3)
    assert given.times_as_fast == exact.time_s / best.time_s > 1
    assert "gradients are up to 3 updates old, its fullest device needs 953.7 MiB more, and in the study" in str(given)
    lost = f"an MLP lost {first.points:.1f} ± {first.interval:.1f} points"
    assert f"in the study of {accuracy_study().date}, {lost}" in str(given)
    assert price_of_staleness(model(), PLACE, options(), exact) is None
    unknown = GivenUp(plan="p", exact="e", times_as_fast=1.0, staleness=1, extra_bytes=-1024, measured=())
    assert "up to 1 update old, its fullest device needs 1.0 KiB less, and what that costs in accuracy was not" in str(
        unknown
    )
    other = unknown.replace(
        measured=(LostAccuracy(model="a VGG", version="stash", staleness=7, points=-2, interval=1),),
        measured_on="today",
    )
    assert "in the study of today with gradients up to 7 updates old, a VGG gained 2.0 ± 1.0 points" in str(other)


def test_the_figures_of_the_package_are_those_of_the_log() -> None:
    log = (Path(__file__).parents[2] / "docs" / "log" / "experiments.md").read_text("utf-8")
    assert f"## {accuracy_study().date}: " in log
    for each in accuracy_study().figures:
        assert f"−{each.points:.1f} ± {each.interval:.1f}" in log


def test_figures_of_the_nearest_staleness_that_is_no_smaller_are_taken() -> None:
    stash, vertical = (search(model(), PLACE, options(correction="none")).best, Version(kind="vertical"))
    assert stash is not None
    place = stash.plan.place
    plans = {n: stash.plan.replace(place=place.replace(workers=n)) for n in (2, 3, 4, 8, 16)}
    assert {n: staleness_of(plan) for n, plan in plans.items()} == {2: 1, 3: 2, 4: 3, 8: 7, 16: 15}
    found = {n: {each.staleness for each in accuracy_study().of(plan)} for n, plan in plans.items()}
    assert found == {2: {1}, 3: {3}, 4: {3}, 8: {7}, 16: {7}}
    assert staleness_of(plans[4].replace(version=vertical)) == 3
    assert (
        accuracy_study().lost(
            plans[4].replace(version=Version(kind="stash", correction="discrepancy", rate_updates=1, decay=0.5))
        )
        < inf
    )
