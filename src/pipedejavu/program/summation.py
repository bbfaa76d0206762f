"""The division of sums over the machines of a summation service, after BytePS.

n machines train and push a vector; they and k helpers, whose interfaces are as fast, each sum a part of it, which the
n machines pull. With the shares below every interface carries the same bytes in each direction:

    a trainer   pushes what others sum, 1 − g, and serves its own part to n − 1: 1 + (n − 2) g
    a helper    takes and serves its part n times: n h

Without helpers it is an all-reduce, with n of them a parameter server.
"""

from itertools import pairwise

CHUNK_BYTES = 4_000_000
"""Most bytes of a vector that are pushed, summed and pulled as one."""
LEAST_CHUNK_BYTES, MOST_PARTS = 65_536, 16
"""A machine's run is divided into parts, so that pushes and pulls overlap, as long as they have so many bytes each."""


def summing_shares(trainers: int, helpers: int) -> tuple[float, float]:
    """Returns the share of a vector that each trainer sums, and the share that each helper sums."""
    if helpers >= trainers:
        return 0.0, 1 / helpers
    whole = trainers**2 + helpers * trainers - 2 * helpers
    return (trainers - helpers) / whole, 2 * (trainers - 1) / whole


def interface_share(trainers: int, helpers: int) -> float:
    """Returns what the busiest interface carries in each direction, as a multiple of the vector."""
    trainer, helper = summing_shares(trainers, helpers)
    return max(1 + (trainers - 2) * trainer, trainers * helper if helpers else 0.0)


def summed_runs(numel: int, trainers: int, helpers: int) -> list[range]:
    """Returns the elements that each machine sums, trainers first; together they are all of them."""
    trainer, helper = summing_shares(trainers, helpers)
    ends, total = [0], 0.0
    for share in (trainer,) * trainers + (helper,) * helpers:
        total += share
        ends.append(min(numel, round(total * numel)))
    ends[-1] = numel
    return [range(start, end) for start, end in pairwise(ends)]


def chunks_of(run: range, itemsize: int) -> list[range]:
    """Returns a run in equal chunks of at most `CHUNK_BYTES`: several, if they are not too small."""
    size_bytes = len(run) * itemsize
    count = max(-(-size_bytes // CHUNK_BYTES), min(MOST_PARTS, size_bytes // LEAST_CHUNK_BYTES))
    ends = [run.start + len(run) * n // count for n in range(count + 1)] if count else []
    return [range(start, end) for start, end in pairwise(ends)]
