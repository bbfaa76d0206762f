"""Plans that a forecast cannot tell apart."""

import math

import pytest

from pipedejavu.plan import Plan
from pipedejavu.search import RankedPlan
from pipedejavu.search.rivals import describe_rivals, error_of, rivals
from pipedejavu.search.search_result import MemoryNeed
from tests.search.case import machine, profile


def ranked(name: str, time_s: float, error: dict[str, float]) -> RankedPlan:
    return RankedPlan(
        plan=Plan(name=name), time_s=time_s, samples=8, bubble_fraction=0.0, bound="", estimated_s=time_s,
        memory=(MemoryNeed(device="gpu0", need_bytes=1, room_bytes=2),),
        machine=machine(["fast"]), profile=profile([1e-3]).replace(error=error),
    )  # fmt: skip


def test_a_plan_is_a_rival_if_it_is_faster_with_a_chance_of_a_fifth() -> None:
    # The quantile of 0.8 is 0.8416, and the error of a ratio is that of a time, times the root of two.
    limit = math.exp(0.8416 * math.sqrt(2) * 0.1)
    plans = [ranked(f"{ratio:.3f}", ratio, {"fast": 0.1}) for ratio in (1.0, 1.05, limit - 1e-3, limit + 1e-3)]
    assert [other.plan.name for other in rivals(plans)] == [plan.plan.name for plan in plans[1:3]]


def test_measured_times_have_the_error_of_runs_and_are_decided_by_running() -> None:
    plans = [ranked("a", 1.0, {}), ranked("b", 1.01, {}), ranked("c", 2.0, {})]
    assert error_of(plans[0]) == pytest.approx(0.08)
    assert describe_rivals(plans) == (
        "These 2 cannot be told apart by forecasts that are off by 8%: 'a', 'b'; train --try 2 runs them and keeps the"
        " fastest."
    )


def test_estimated_times_are_decided_by_measuring() -> None:
    said = describe_rivals([ranked("a", 1.0, {"fast": 0.2}), ranked("b", 1.01, {"fast": 0.2})])
    assert said.endswith(
        "off by 20%: 'a', 'b'; profile the model on one fast, whose times are estimated, to narrow it most."
    )
    assert describe_rivals([ranked("a", 1.0, {"fast": 0.2}), ranked("b", 2.0, {"fast": 0.2})]) == ""
