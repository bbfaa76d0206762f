"""The searcher that looks at every draft: the truth on small cases."""

from collections.abc import Iterator
from itertools import accumulate, combinations, pairwise, product
from math import comb, prod

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
            for groups in frame.seatings(units):
                choices = prod(len(frame.zeros) if size > 1 else 1 for size, _ in groups)
                total += choices * comb(units - 1, len(groups) - 1)
                if total > most or pool.is_over:
                    return most + 1
    return total


def drafts(frame: Frame) -> Iterator[Draft]:
    """Yields every cut of a frame, with every division of its devices into groups and of state over these."""
    units = len(frame.scene.profile.units)
    for groups in frame.seatings(units):
        ends = (0, *accumulate(size * shards for size, shards in groups))
        members = [frame.order[first:end] for first, end in pairwise(ends)]
        for bounds in combinations(range(1, units), len(groups) - 1):
            for zeros in product(*(frame.zeros if size > 1 else (0,) for size, _ in groups)):
                each = zip(pairwise((0, *bounds, units)), members, groups, zeros, strict=True)
                stages = tuple(Stage(*run, group, shards, zero) for run, group, (_, shards), zero in each)
                yield Draft(frame.scene, stages, frame.samples, frame.microbatches, frame.mode, frame.is_stale)
