"""The floor of a draft: a time that its plan cannot be simulated to be below, so that slow ones need no simulation."""

from pipedejavu.search.candidate_plan import CandidatePlan
from pipedejavu.search.plan_estimate import slots_of
from pipedejavu.search.stage_cost import StageCosts

ROUNDING = 1e-9
"""Part of a time that the order of sums may make of it."""


def lower_bound_s(candidate: CandidatePlan, costs: StageCosts) -> float:
    """Returns the time of the busiest device at least, and of what is before it: 0 where the order of work is free.

    A stage begins when a microbatch has come through those before it, computes all of its part of the batch, and then
    that microbatch's gradients have the way back; nothing is assumed to wait, to be sent or to be updated.
    """
    if candidate.is_stale or candidate.is_shared:
        return 0.0
    before, floor = 0.0, 0.0
    for stage, slot in reversed([*slots_of(candidate)]):
        units = costs.recomputed_units(stage.start, stage.end, slot, candidate.mode)
        work, again = [], []
        for kind in slot.place.kinds:
            forward, backward, recompute, _ = costs.works(kind)
            work.append(float(sum(total[stage.end] - total[stage.start] for total in (forward, backward))))
            again.append(float(sum(recompute[unit + 1] - recompute[unit] for unit in units)))
        floor = max(floor, before + slot.share * max(a + b for a, b in zip(work, again, strict=True)))
        before += min(work)
    return floor * (1 - ROUNDING)
