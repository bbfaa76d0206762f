"""Feasibility: whether a machine can hold a model, by memory estimates alone; faster than a search, but not certain."""

import numpy as np

from pipedejavu.facts import Machine, Profile
from pipedejavu.search.planning_problem import problems_of
from pipedejavu.search.search_options import SearchOptions
from pipedejavu.search.slot import schedule_slot
from pipedejavu.search.stage_cost import StageCosts
from pipedejavu.search.subspace import SearchSubspace, subspaces


def is_feasible(profile: Profile, machine: Machine, options: SearchOptions) -> bool:
    """Returns whether the memory estimate of some pipeline with equal groups fits."""
    for problem in problems_of(profile, machine, options):
        costs: dict[int, StageCosts] = {}
        for subspace in subspaces(problem, options):
            if subspace.is_free:
                continue
            if subspace.samples not in costs:
                costs[subspace.samples] = StageCosts(problem, subspace.samples)
            if _can_hold(subspace, costs[subspace.samples]):
                return True
    return False


def _can_hold(subspace: SearchSubspace, costs: StageCosts) -> bool:
    """Whether all units fit if each stage, from the first on, takes as many as it can hold."""
    size, start = subspace.sizes[0], 0
    for after in range(len(subspace.order) - size, -1, -size):
        slot = subspace.device_order.slot(after, size)
        scheduled = schedule_slot(slot, subspace.microbatches, subspace.is_stale, subspace.mode.zero)
        ends = np.arange(start + 1, costs.num_units - after // size + 1)  # every stage holds at least one unit
        cost = costs.stage(np.full_like(ends, start), ends, scheduled, subspace.mode)
        fitting = ends[cost.fits]
        if not len(fitting):
            return False
        start = int(fitting[-1])
    return start == costs.num_units
