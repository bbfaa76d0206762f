"""The loop over frames: those that may hold the best plan come first, and those that cannot are left out."""

from collections.abc import Callable
from math import inf

from pipedejavu.search.candidate_plan import CandidatePlan, PlanningProblem
from pipedejavu.search.plan_pool import SLACK, Pool
from pipedejavu.search.search_options import SearchOptions
from pipedejavu.search.stage_cost import StageCosts
from pipedejavu.search.subspace import SearchSubspace, subspaces
from pipedejavu.search.subspace_bound import Bounds

Solve = Callable[[SearchSubspace, StageCosts, float], CandidatePlan | None]
"""Returns the best draft of a frame that takes less than a time, if there is one."""


GUESS_SHARE = 0.3
"""The part of the time budget for guesses."""
LIST_SHARE = 0.3
"""The part of the time budget for the list of frames: of very many devices it is not whole by then."""


def branch_and_bound(
    pool: Pool, problems: list[PlanningProblem], options: SearchOptions, solve: Solve, guess: Solve | None = None
) -> bool:
    """Solves frames, the most promising first, until none can be better; returns whether that point was reached.

    Those are the frames with the least bound. A searcher that takes long for a frame gives a `guess`, which is quick:
    then the frames with the best guesses come first, which may be others where devices are unlike.
    """
    queue, is_whole = _listed(pool, problems, options)
    if guess is not None:
        queue = _by_guess(pool, queue, guess)
    for index, (least, subspace) in enumerate(queue):
        if least >= pool.cutoff and guess is None:
            break
        if least >= pool.limit(subspace):
            continue
        if pool.is_over:
            return False
        pool.report(index / len(queue), f"cutting for {len(subspace.order)} devices, {subspace.mode}")
        candidate = solve(subspace, pool.costs(subspace.problem, subspace.samples), pool.limit_s(subspace))
        if candidate is not None:
            pool.offer(candidate)
    return is_whole


def _listed(
    pool: Pool, problems: list[PlanningProblem], options: SearchOptions
) -> tuple[list[tuple[float, SearchSubspace]], bool]:
    """Returns frames with their bounds, the least first, and whether these are all."""
    queue, bounds, until_s = [], Bounds(), pool.elapsed_s + LIST_SHARE * options.time_budget_s
    is_whole = True
    for subspace in (subspace for problem in problems for subspace in subspaces(problem, options)):
        if pool.elapsed_s > until_s:
            is_whole = False
            break
        pool.report(0.0, f"listing plans for {len(subspace.order)} devices")
        least = bounds.least_s(subspace, pool.costs(subspace.problem, subspace.samples))
        if least < inf:
            queue.append((pool.score(subspace.problem, subspace.order, least), subspace))
    return sorted(queue, key=lambda item: item[0]), is_whole


def _by_guess(
    pool: Pool, queue: list[tuple[float, SearchSubspace]], guess: Solve
) -> list[tuple[float, SearchSubspace]]:
    """Returns frames in the order of their guesses, as far as the time for them goes; the others behind."""
    until_s = pool.elapsed_s + GUESS_SHARE * pool.options.time_budget_s
    scores, fitting = [inf] * len(queue), dict[object, float]()
    for index, (least, subspace) in enumerate(queue):
        if pool.elapsed_s > until_s:
            break
        alike = (subspace.row, subspace.sizes, subspace.samples, subspace.is_stale)
        if alike in fitting:  # what saves memory that is there makes nothing faster
            scores[index] = SLACK * fitting[alike]
        elif least < pool.limit(subspace):
            candidate = guess(subspace, pool.costs(subspace.problem, subspace.samples), inf)
            if candidate is not None:
                cost = pool.estimate(candidate)
                pool.offer(candidate, cost)
                scores[index] = pool.score(subspace.problem, subspace.order, cost.time_s) * max(cost.shortage, 1.0) ** 2
                if cost.fits:
                    fitting[alike] = scores[index]
    return [queue[index] for index in sorted(range(len(queue)), key=scores.__getitem__)]
