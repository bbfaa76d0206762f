"""Moves threads between the stages of a host that run at the same time, such as loaders and trainers on the CPU."""

from collections.abc import Sequence

from pipedejavu.engine.share_control import DEAD_BAND


def adjusted_threads(threads: Sequence[int], times_s: Sequence[float]) -> tuple[int, ...]:
    """Returns the threads per stage for the next round, from those of this round and the stages' times.

    At most one thread moves, from the stage that can spare it best to the slowest one, and only if the slowest stage of
    all then ends earlier by more than the dead band. A stage's work is taken to divide evenly over its threads.
    """
    work = [count * time for count, time in zip(threads, times_s, strict=True)]
    slowest = max(range(len(work)), key=times_s.__getitem__)
    donors = [n for n, count in enumerate(threads) if count > 1 and n != slowest]
    if not donors or min(times_s) < 0 or max(times_s) <= 0:
        return tuple(threads)
    donor = min(donors, key=lambda n: work[n] / (threads[n] - 1))
    moved = [count + (n == slowest) - (n == donor) for n, count in enumerate(threads)]
    then = max(each / count for each, count in zip(work, moved, strict=True))
    return tuple(moved) if then < max(times_s) * (1 - DEAD_BAND) else tuple(threads)
