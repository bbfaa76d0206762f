"""The searcher that looks at every draft: the truth on small cases."""

from collections.abc import Iterator
from itertools import combinations
from math import comb

from pipedejavu.search.draft import Draft, Scene, Stage
from pipedejavu.search.option import Options
from pipedejavu.search.pool import Pool
from pipedejavu.search.space import Frame, frames


def run(pool: Pool, scenes: list[Scene], options: Options) -> bool:
    """Estimates every draft; returns whether the time was enough."""
    for scene in scenes:
        pool.report(0.0, "looking at every plan")
        for frame in frames(scene, options):
            for draft in drafts(frame):
                pool.offer(draft)
                if pool.is_over:
                    return False
    return True


def count(pool: Pool, scenes: list[Scene], options: Options, most: int) -> int:
    """Returns how many drafts there are, or a number above `most`."""
    total = 0
    for scene in scenes:
        units = len(scene.profile.units)
        for frame in frames(scene, options):
            for sizes in compositions(len(frame.order), frame.sizes, units):
                total += comb(units - 1, len(sizes) - 1)
                if total > most or pool.is_over:
                    return most + 1
    return total


def drafts(frame: Frame) -> Iterator[Draft]:
    """Yields every cut of a frame, with every division of its devices into groups."""
    units = len(frame.scene.profile.units)
    for sizes in compositions(len(frame.order), frame.sizes, units):
        for bounds in combinations(range(1, units), len(sizes) - 1):
            stages, used = [], 0
            for start, end, size in zip((0, *bounds), (*bounds, units), sizes, strict=True):
                stages.append(Stage(start, end, frame.order[used : used + size]))
                used += size
            yield Draft(frame.scene, tuple(stages), frame.samples, frame.microbatches, frame.mode, frame.is_stale)


def compositions(total: int, sizes: tuple[int, ...], most: int) -> Iterator[tuple[int, ...]]:
    """Yields all ways to write a number as a sum of at most `most` sizes, order counted."""
    if total == 0:
        yield ()
    elif most:
        for size in sizes:
            if size <= total:
                yield from ((size, *rest) for rest in compositions(total - size, sizes, most - 1))
