"""A lower bound of a candidate's simulated time, so that slow candidates need no simulation."""

from pipedejavu.search.candidate_plan import CandidatePlan
from pipedejavu.search.plan_estimate import schedule_of
from pipedejavu.search.stage_cost import StageCosts

ROUNDING = 1e-9
"""Relative error that the order of a sum may cause."""


def lower_bound_s(candidate: CandidatePlan, costs: StageCosts) -> float:
    """Returns the busiest stage's compute time plus one microbatch's time through the stages before it.

    A stage starts when the first microbatch has passed the stages before it and computes all its microbatches; then the
    last gradients go back through those stages. Waits, transfers and updates are not counted. The bound is 0 if the
    pipeline never drains or the batch is shared by speed.
    """
    if candidate.is_stale or candidate.is_shared:
        return 0.0
    before, bound = 0.0, 0.0
    for stage, scheduled in reversed([*schedule_of(candidate)]):
        units = costs.recompute(stage.start, stage.end, scheduled, candidate.mode).units
        work, recomputed = [], []
        for kind in scheduled.slot.kinds:
            forward, backward, recompute, _ = costs.works(kind)
            work.append(float(sum(total[stage.end] - total[stage.start] for total in (forward, backward))))
            recomputed.append(float(sum(recompute[unit + 1] - recompute[unit] for unit in units)))
        each = [a + b for a, b in zip(work, recomputed, strict=True)]
        # If the replicas cannot have the same number of microbatches, the slowest may be one with fewer.
        fewest = candidate.microbatches // len(scheduled.slot.group)
        bound = max(bound, before + max(scheduled.microbatches * min(each), fewest * max(each)))
        before += min(work)
    return bound * (1 - ROUNDING)
