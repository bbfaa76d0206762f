"""The loop over frames: those that may hold the best plan come first, and those that cannot are left out."""

from collections.abc import Callable
from math import inf

from pipedejavu.search.cost import Costs
from pipedejavu.search.draft import Draft, Scene
from pipedejavu.search.option import Options
from pipedejavu.search.pool import SLACK, Pool
from pipedejavu.search.space import Bounds, Frame, frames

Solve = Callable[[Frame, Costs, float], Draft | None]
"""Returns the best draft of a frame that takes less than a time, if there is one."""


GUESS_SHARE = 0.3
"""The part of the time budget for guesses."""
LIST_SHARE = 0.3
"""The part of the time budget for the list of frames: of very many devices it is not whole by then."""


def solve_frames(pool: Pool, scenes: list[Scene], options: Options, solve: Solve, guess: Solve | None = None) -> bool:
    """Solves frames, the most promising first, until none can be better; returns whether that point was reached.

    Those are the frames with the least bound. A searcher that takes long for a frame gives a `guess`, which is quick:
    then the frames with the best guesses come first, which may be others where devices are unlike.
    """
    queue, is_whole = _listed(pool, scenes, options)
    if guess is not None:
        queue = _by_guess(pool, queue, guess)
    for index, (least, frame) in enumerate(queue):
        if least >= pool.cutoff and guess is None:
            break
        if least >= pool.limit(frame):
            continue
        if pool.is_over:
            return False
        pool.report(index / len(queue), f"cutting for {len(frame.order)} devices, {frame.mode}")
        draft = solve(frame, pool.costs(frame.scene, frame.samples), pool.limit_s(frame))
        if draft is not None:
            pool.offer(draft)
    return is_whole


def _listed(pool: Pool, scenes: list[Scene], options: Options) -> tuple[list[tuple[float, Frame]], bool]:
    """Returns frames with their bounds, the least first, and whether these are all."""
    queue, bounds, until_s = [], Bounds(), pool.elapsed_s + LIST_SHARE * options.time_budget_s
    is_whole = True
    for frame in (frame for scene in scenes for frame in frames(scene, options)):
        if pool.elapsed_s > until_s:
            is_whole = False
            break
        pool.report(0.0, f"listing plans for {len(frame.order)} devices")
        least = bounds.least_s(frame, pool.costs(frame.scene, frame.samples))
        if least < inf:
            queue.append((pool.score(frame.scene, frame.order, least), frame))
    return sorted(queue, key=lambda item: item[0]), is_whole


def _by_guess(pool: Pool, queue: list[tuple[float, Frame]], guess: Solve) -> list[tuple[float, Frame]]:
    """Returns frames in the order of their guesses, as far as the time for them goes; the others behind."""
    until_s = pool.elapsed_s + GUESS_SHARE * pool.options.time_budget_s
    scores, fitting = [inf] * len(queue), dict[object, float]()
    for index, (least, frame) in enumerate(queue):
        if pool.elapsed_s > until_s:
            break
        alike = (frame.row, frame.sizes, frame.samples, frame.is_stale)
        if alike in fitting:  # what saves memory that is there makes nothing faster
            scores[index] = SLACK * fitting[alike]
        elif least < pool.limit(frame):
            draft = guess(frame, pool.costs(frame.scene, frame.samples), inf)
            if draft is not None:
                cost = pool.estimate(draft)
                pool.offer(draft, cost)
                scores[index] = pool.score(frame.scene, frame.order, cost.time_s) * max(cost.shortage, 1.0) ** 2
                if cost.fits:
                    fitting[alike] = scores[index]
    return [queue[index] for index in sorted(range(len(queue)), key=scores.__getitem__)]
