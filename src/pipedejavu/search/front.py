"""The front of time and memory: beside the fastest plan, those that would be fastest with less and less memory."""

import time

from pipedejavu.facts import Machine, Profile
from pipedejavu.search.memory_limit import with_memory
from pipedejavu.search.search import search
from pipedejavu.search.search_options import Progress, SearchOptions
from pipedejavu.search.search_result import RankedPlan

STEP = 0.75
"""Of the fullest memory of one plan, what the next one may fill."""
MOST_STEPS = 6
BUDGET_S = 20.0
"""For all of them together."""
MOST_TIMES = 10.0
"""As long as the fastest plan: what takes more is of no use."""


def leaner_plans(
    profile: Profile, machine: Machine, options: SearchOptions, best: RankedPlan, progress: Progress | None = None
) -> tuple[RankedPlan, ...]:
    """Returns the best plans for smaller and smaller parts of every memory, until nothing fits that is of use."""
    found, until_s = list[RankedPlan](), time.monotonic() + BUDGET_S
    share = best.fullest_share
    for step in range(MOST_STEPS):
        share *= STEP
        rest_s = until_s - time.monotonic()
        if rest_s <= 0:
            break
        if progress:
            progress(step / MOST_STEPS, f"with {share:.0%} of all memory")
        asked = options.replace(searcher="auto", time_budget_s=min(rest_s, options.time_budget_s))
        other = search(profile, with_memory(machine, times=share), asked).best
        if other is None or other.time_per_sample_s > MOST_TIMES * best.time_per_sample_s:
            break
        memory = tuple(need.replace(room_bytes=round(need.room_bytes / share)) for need in other.memory)
        found.append(other.replace(memory=memory))
        share = found[-1].fullest_share
    return tuple(found)
