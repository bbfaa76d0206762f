"""Which of the best plans a forecast cannot tell apart, and what would.

The errors of forecasts of unlike plans are nearly independent: in 440 pairs of published runs of one model on as many
GPUs, divided in other ways, errors differ 1.04 times as much as independent ones would. So a plan may be faster than
the first although its forecast is longer.
"""

from collections.abc import Sequence
from math import exp, sqrt
from statistics import NormalDist

from pipedejavu.search.search_result import RankedPlan
from pipedejavu.simulate.chance import OFF

LEAST_CHANCE = 0.2
"""A plan that is faster than the first with at least this probability cannot be told from it."""


def error_of(ranked: RankedPlan) -> float:
    """Returns the standard deviation of the logarithm of measured ÷ forecast times, of plans on the same devices."""
    devices = [ranked.machine.device(need.device) for need in ranked.memory]
    kinds = {d.kind for d in devices if d.type == "gpu"} or {d.kind for d in devices}
    if known := [ranked.profile.error[kind] for kind in kinds if kind in ranked.profile.error]:
        return max(known)
    return max((OFF[d.type] for d in devices if d.kind in kinds), default=0.0)


def rivals(candidates: Sequence[RankedPlan]) -> tuple[RankedPlan, ...]:
    """Returns the plans after the first that may be faster than it, by the error of such forecasts."""
    first, *others = candidates
    most = exp(-NormalDist().inv_cdf(LEAST_CHANCE) * sqrt(2) * error_of(first))
    return tuple(other for other in others if other.time_per_sample_s <= most * first.time_per_sample_s)


def describe_rivals(candidates: Sequence[RankedPlan]) -> str:
    """Returns a sentence on the plans that cannot be told from the first, and on what decides; empty if all can."""
    found = rivals(candidates)
    if not found:
        return ""
    first, error = candidates[0], error_of(candidates[0])
    names = ", ".join(f"'{ranked.plan.name}'" for ranked in (first, *found))
    text = f"These {len(found) + 1} cannot be told apart by forecasts that are off by {error:.0%}: {names}"
    if not first.profile.error:
        return f"{text}; train --try {len(found) + 1} runs them and keeps the fastest."
    worst = max(first.profile.error, key=lambda kind: first.profile.error[kind])
    return f"{text}; profile the model on one {worst}, whose times are estimated, to narrow it most."
