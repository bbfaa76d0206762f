"""The Pareto front of time and memory: the fastest plans for less and less memory.

Each point needs its own `search`: a plan for less memory has other cuts, modes and microbatches, which a search with
more memory does not keep.
"""

import time

from pipedejavu.facts import Machine, Profile
from pipedejavu.search.memory_limit import with_memory
from pipedejavu.search.search import search
from pipedejavu.search.search_options import Progress, SearchOptions
from pipedejavu.search.search_result import RankedPlan

STEP = 0.75
"""Memory limit of the next plan, as a share of what the last one fills."""
MOST_STEPS = 6
BUDGET_S = 20.0
"""Time for all searches together."""
MOST_TIMES = 10.0
"""A plan that takes more than this many times the fastest is of no use."""


def leaner_plans(
    profile: Profile, machine: Machine, options: SearchOptions, best: RankedPlan, progress: Progress | None = None
) -> tuple[RankedPlan, ...]:
    """Returns the best plans for smaller and smaller memory limits, until nothing useful fits."""
    plans, until_s = list[RankedPlan](), time.monotonic() + BUDGET_S
    share = best.fullest_share
    for step in range(MOST_STEPS):
        share *= STEP
        rest_s = until_s - time.monotonic()
        if rest_s <= 0:
            break
        if progress:
            progress(step / MOST_STEPS, f"with {share:.0%} of all memory")
        remaining = options.replace(searcher="auto", time_budget_s=min(rest_s, options.time_budget_s))
        other = search(profile, with_memory(machine, times=share), remaining).best
        if other is None or other.time_per_sample_s > MOST_TIMES * best.time_per_sample_s:
            break
        memory = tuple(need.replace(room_bytes=round(need.room_bytes / share)) for need in other.memory)
        plans.append(other.replace(memory=memory))
        share = plans[-1].fullest_share
    return tuple(plans)
