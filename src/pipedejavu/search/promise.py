"""The loop over frames: those that may hold the best plan come first, and those that cannot are left out."""

from collections.abc import Callable
from math import inf

from pipedejavu.search.cost import Costs
from pipedejavu.search.draft import Draft, Scene
from pipedejavu.search.option import Options
from pipedejavu.search.pool import Pool
from pipedejavu.search.space import Bounds, Frame, frames

Solve = Callable[[Frame, Costs, float], Draft | None]
"""Returns the best draft of a frame that takes less than a time, if there is one."""


def solve_frames(pool: Pool, scenes: list[Scene], options: Options, solve: Solve) -> bool:
    """Solves frames, the most promising first, until none can be better; returns whether that point was reached."""
    queue, bounds = [], Bounds()
    for scene in scenes:
        for frame in frames(scene, options):
            least = bounds.least_s(frame, pool.costs(scene, frame.samples))
            if least < inf:
                queue.append((pool.score(scene, frame.order, least), frame))
            if pool.is_over:
                return False
    queue.sort(key=lambda item: item[0])
    for index, (least, frame) in enumerate(queue):
        if least >= pool.cutoff:
            break
        if pool.is_over:
            return False
        pool.report(index / len(queue), f"cutting for {len(frame.order)} devices, {frame.mode}")
        draft = solve(frame, pool.costs(frame.scene, frame.samples), pool.limit_s(frame.scene, frame.order))
        if draft is not None:
            pool.offer(draft)
    return True
