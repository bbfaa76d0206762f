"""Neighbours of a candidate plan: one boundary moved by a unit, or one device moved to the next stage.

Estimates of pipelines with unlike stages err by some percent, so the best candidates are compared with their neighbours
in the simulator.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from pipedejavu.search.candidate_plan import CandidatePlan
from pipedejavu.search.subspace import MOST_FREE


def neighbours(candidate: CandidatePlan) -> Iterator[CandidatePlan]:
    """Yields the neighbours of a pipeline on few devices, which shares no batch by speed and divides no operators."""
    stages, has_ties = candidate.stages, bool(candidate.problem.profile.ties)
    is_plain = not (
        candidate.is_shared or candidate.is_stale or candidate.problem.joined_from or candidate.has_tp_groups
    )
    if not is_plain or len(stages) < 2 or len(candidate.devices) > MOST_FREE:
        return
    for at, (one, two) in enumerate(pairwise(stages)):
        moved = [(one.end + by, len(one.group)) for by in (-1, 1)]
        moved += [(one.end, len(one.group) + by) for by in (-1, 1)] if not has_ties else []
        both = one.group + two.group
        for end, size in moved:
            if (
                one.start < end < two.end
                and 0 < size < len(both)
                and max(size, len(both) - size) <= candidate.microbatches
            ):
                pair = replace(one, end=end, group=both[:size]), replace(two, start=end, group=both[size:])
                yield replace(candidate, stages=(*stages[:at], *pair, *stages[at + 2 :]))
