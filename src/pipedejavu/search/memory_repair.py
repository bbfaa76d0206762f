"""Memory repair: a candidate is cut again for the memory that its simulation found missing.

Estimates of memory do not know which buffers of a pipeline are full at the same time. A device that is short by some
bytes is planned for with so many less, and all others as before: its stage gets other units, more devices or more
recompute.
"""

from dataclasses import replace

from pipedejavu.search.candidate_plan import CandidatePlan
from pipedejavu.search.dp import MOST_CUTS, solve
from pipedejavu.search.memory_limit import memory_limit_of
from pipedejavu.search.plan_pool import Pool, PooledPlan
from pipedejavu.search.ranking import Timed, shortages
from pipedejavu.search.subspace import subspace_of


def repaired(pool: Pool, candidate: CandidatePlan, timed: Timed) -> PooledPlan | None:
    """Returns the best candidate on the same devices, for less memory on those that the simulation found short.

    None if no memory is short, if nothing fits, or if the batch is shared by speed or devices are joined into groups.
    """
    problem = candidate.problem
    missing = shortages(timed)
    if not missing or candidate.is_shared or problem.joined_from is not None:
        return None
    machine = problem.machine
    devices = []
    for device in machine.devices:
        limit = memory_limit_of(device) - missing.get(device.name, 0)
        devices.append(device.replace(memory_bytes=device.reserved_bytes + max(limit, 0)))
    lowered = replace(problem, machine=machine.replace(devices=tuple(devices)))
    pool.adopt(lowered, problem)
    subspace = subspace_of(replace(candidate, problem=lowered), pool.options, may_regroup=True)
    costs = pool.costs(lowered, candidate.samples)
    other = solve(subspace, costs, step=-(-costs.num_units // MOST_CUTS))
    if other is None:
        return None
    estimate = pool.estimate(other)
    score = pool.score(lowered, other.devices, estimate.time_s)
    return PooledPlan(other, estimate, score) if score <= pool.max_score else None
