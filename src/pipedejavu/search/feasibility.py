"""Whether a machine can hold a model at all, by estimates of memory alone: quicker than a search, and no promise."""

import numpy as np

from pipedejavu.facts import Machine, Profile
from pipedejavu.search.planning_problem import problems_of
from pipedejavu.search.search_options import SearchOptions
from pipedejavu.search.slot import slot_of
from pipedejavu.search.stage_cost import StageCosts
from pipedejavu.search.subspace import SearchSubspace, subspaces


def is_feasible(profile: Profile, machine: Machine, options: SearchOptions) -> bool:
    """Returns whether some pipeline of groups that are alike is estimated to have room for all units."""
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
    """Gives each stage as many units as it has room for, from the first stage on: what is left must fit the last."""
    size, start = subspace.sizes[0], 0
    for after in range(len(subspace.order) - size, -1, -size):
        place = subspace.row.place(after, size)
        slot = slot_of(place, subspace.microbatches, subspace.is_stale, subspace.mode.zero)
        ends = np.arange(start + 1, costs.num_units - after // size + 1)  # every stage has a unit at least
        cost = costs.stage(np.full_like(ends, start), ends, slot, subspace.mode)
        fitting = ends[(cost.device_bytes <= place.room_bytes) & (cost.host_bytes <= place.host_room_bytes)]
        if not len(fitting):
            return False
        start = int(fitting[-1])
    return start == costs.num_units
