"""The exhaustive searcher: estimates every candidate, and so knows the optimum of small cases."""

from collections.abc import Iterator
from itertools import accumulate, combinations, pairwise, product
from math import comb, prod

from pipedejavu.search.candidate_plan import CandidatePlan, PlanningProblem, Stage
from pipedejavu.search.plan_pool import Pool
from pipedejavu.search.search_options import SearchOptions
from pipedejavu.search.subspace import SearchSubspace, subspaces


def run(pool: Pool, problems: list[PlanningProblem], options: SearchOptions) -> bool:
    """Estimates every candidate; returns whether the time was enough."""
    for problem in problems:
        pool.report(0.0, "looking at every plan")
        for subspace in subspaces(problem, options):
            for candidate in candidate_plans(subspace):
                pool.offer(candidate)
                if pool.is_over:
                    return False
    return True


def count(pool: Pool, problems: list[PlanningProblem], options: SearchOptions, most: int) -> int:
    """Returns the number of candidates, or a number above `most`."""
    total = 0
    for problem in problems:
        units = len(problem.profile.units)
        for subspace in subspaces(problem, options):
            for groups in subspace.groupings(units):
                choices = prod(len(subspace.zeros) if size > 1 else 1 for size, _ in groups)
                total += choices * comb(units - 1, len(groups) - 1)
                if total > most or pool.is_over:
                    return most + 1
    return total


def candidate_plans(subspace: SearchSubspace) -> Iterator[CandidatePlan]:
    """Yields every candidate of a subspace: each division into groups, each cut and each choice of ZeRO."""
    units = len(subspace.problem.profile.units)
    for groups in subspace.groupings(units):
        ends = (0, *accumulate(size * shards for size, shards in groups))
        members = [subspace.order[first:end] for first, end in pairwise(ends)]
        for bounds in combinations(range(1, units), len(groups) - 1):
            for zeros in product(*(subspace.zeros if size > 1 else (0,) for size, _ in groups)):
                each = zip(pairwise((0, *bounds, units)), members, groups, zeros, strict=True)
                stages = tuple(Stage(*run, group, shards, zero) for run, group, (_, shards), zero in each)
                yield CandidatePlan(
                    subspace.problem, stages, subspace.samples, subspace.microbatches, subspace.mode, subspace.is_stale
                )
