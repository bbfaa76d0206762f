"""Branch and bound over subspaces: the least lower bound comes first, and what cannot be better is skipped."""

from collections.abc import Callable
from math import inf

from pipedejavu.search.candidate_plan import CandidatePlan, PlanningProblem
from pipedejavu.search.plan_pool import SLACK, Pool
from pipedejavu.search.search_options import SearchOptions
from pipedejavu.search.stage_cost import StageCosts
from pipedejavu.search.subspace import SearchSubspace, subspaces
from pipedejavu.search.subspace_bound import Bounds

Solve = Callable[[SearchSubspace, StageCosts, float], CandidatePlan | None]
"""Returns the best candidate of a subspace that takes less than a time, or None."""


GUESS_SHARE = 0.3
"""Share of the time budget for initial guesses."""
LIST_SHARE = 0.3
"""Share of the time budget for listing subspaces: for very many devices the list stays incomplete."""


def branch_and_bound(
    pool: Pool, problems: list[PlanningProblem], options: SearchOptions, solve: Solve, guess: Solve | None = None
) -> bool:
    """Solves subspaces in the order of their lower bounds until none can be better; returns whether it got there.

    A slow searcher passes a quick `guess`; then subspaces are solved in the order of their guesses, which differs from
    the order of lower bounds if devices are unequal.
    """
    queue, is_complete = _listed(pool, problems, options)
    if guess is not None:
        queue = _by_guess(pool, queue, guess)
    solved = set[object]()
    for index, (least, subspace) in enumerate(queue):
        if least >= pool.cutoff and guess is None:
            break
        key = subspace.key_without_recompute
        if least >= pool.limit(subspace) or (key in solved and not subspace.mode.recomputes):
            continue
        if pool.is_over:
            return False
        pool.report(index / len(queue), f"cutting for {len(subspace.order)} devices, {subspace.mode}")
        candidate = solve(subspace, pool.costs(subspace.problem, subspace.samples), pool.limit_s(subspace))
        if candidate is not None:
            pool.offer(candidate)
        # With recompute, stages that fit anyway recompute nothing, so this was the search without recompute, too.
        if guess is None and subspace.mode.recomputes and (candidate is None or not pool.recomputes(candidate)):
            solved.add(key)
    return is_complete


def _listed(
    pool: Pool, problems: list[PlanningProblem], options: SearchOptions
) -> tuple[list[tuple[float, SearchSubspace]], bool]:
    """Returns subspaces with their lower bounds, the least first, and whether the list is complete."""
    queue, bounds, until_s = [], Bounds(), pool.elapsed_s + LIST_SHARE * options.time_budget_s
    is_complete = True
    for subspace in (subspace for problem in problems for subspace in subspaces(problem, options)):
        if pool.elapsed_s > until_s:
            is_complete = False
            break
        pool.report(0.0, f"listing plans for {len(subspace.order)} devices")
        least = bounds.least_s(subspace, pool.costs(subspace.problem, subspace.samples))
        if least < inf:
            queue.append((pool.score(subspace.problem, subspace.order, least), subspace))
    return sorted(queue, key=lambda item: item[0]), is_complete


def _by_guess(
    pool: Pool, queue: list[tuple[float, SearchSubspace]], guess: Solve
) -> list[tuple[float, SearchSubspace]]:
    """Returns subspaces in the order of their guesses; those that there was no time to guess come last."""
    until_s = pool.elapsed_s + GUESS_SHARE * pool.options.time_budget_s
    scores, fitting = [inf] * len(queue), dict[object, float]()
    for index, (least, subspace) in enumerate(queue):
        if pool.elapsed_s > until_s:
            break
        key = (subspace.device_order, subspace.sizes, subspace.samples, subspace.is_stale)
        if key in fitting:  # a mode that saves memory is no faster if the plain one fits
            scores[index] = SLACK * fitting[key]
        elif least < pool.limit(subspace):
            candidate = guess(subspace, pool.costs(subspace.problem, subspace.samples), inf)
            if candidate is not None:
                cost = pool.estimate(candidate)
                pool.offer(candidate, cost)
                scores[index] = pool.score(subspace.problem, subspace.order, cost.time_s) * max(cost.shortage, 1.0) ** 2
                if cost.fits:
                    fitting[key] = scores[index]
    return [queue[index] for index in sorted(range(len(queue)), key=scores.__getitem__)]
