"""Measures collectives of workers of this host through memory that they share: each kind, by number of members.

A collective is timed from the arrival of its last member, so waits for the others do not count. It follows compute, as
in a run, and includes what a run does around it: gradients are packed into one vector first.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import combinations
from statistics import median
from typing import NamedTuple

import torch

from pipedejavu.facts import CollectiveKind, CollectiveTime
from pipedejavu.runtime.memory_group import MemoryGroup
from pipedejavu.runtime.peer_socket import PeerSocket
from pipedejavu.runtime.traffic import even_counts

SMALL_BYTES, LARGE_BYTES = 4 << 10, 16 << 20
"""Sizes of the whole value; the line of a collective goes through both."""
LEAST_SHARE = 0.1
"""Share of the large collective's time that its bytes take at least."""
MOST_MEMBERS = 8
"""Larger groups follow from this many members."""
_PARTS = 4
"""Tensors that are packed into one vector."""
_REPEATS = 7
_SIDE = 256
"""Side of the square matrices multiplied before each collective."""
KINDS: tuple[CollectiveKind, ...] = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")


class CollectiveSample(NamedTuple):
    """One collective of one member."""

    wall_s: float
    cpu_s: float
    """Time of the member's core."""


def measure_collectives(cores: int) -> tuple[CollectiveTime, ...]:
    """Measures all kinds among 2, 4 and 8 members, as far as each has a core; threads stand for the members."""
    counts = [2, *(n for n in (4, MOST_MEMBERS) if n <= cores)]
    return tuple(time for count in counts for time in _measure(count))


def sample_collectives(group: MemoryGroup) -> dict[str, list[list[CollectiveSample]]]:
    """Runs all kinds in one member; returns its samples of both sizes. All members call it together."""
    return {
        kind: [_sample(partial(_prepare, kind, group, size)) for size in (SMALL_BYTES, LARGE_BYTES)] for kind in KINDS
    }


def fit_collectives(
    members: Sequence[dict[str, list[list[CollectiveSample]]]],
) -> tuple[CollectiveTime, ...]:
    """Returns the time of each kind from the samples of all members."""
    return tuple(_fit(kind, [samples[kind] for samples in members]) for kind in KINDS)


def _measure(count: int) -> tuple[CollectiveTime, ...]:
    peers: list[dict[int, PeerSocket]] = [{} for _ in range(count)]
    for one, other in combinations(range(count), 2):
        peers[one][other], peers[other][one] = map(PeerSocket, socket.socketpair())
    groups = [MemoryGroup(member, connected) for member, connected in enumerate(peers)]
    samples: list[dict[str, list[list[CollectiveSample]]]] = [{} for _ in groups]

    def take_part(member: int) -> None:
        samples[member] = sample_collectives(groups[member])

    threads = [threading.Thread(target=take_part, args=(n,), daemon=True) for n in range(1, count)]
    for thread in threads:
        thread.start()
    take_part(0)
    for thread in threads:
        thread.join()
    for group in groups:
        group.close()
    return fit_collectives(samples)


def _prepare(kind: str, group: MemoryGroup, size_bytes: int) -> Callable[[], object]:
    """Returns a call of the collective on a value of this size."""
    size = len(group.members)
    vector = torch.ones(size_bytes // 4 // size * size)
    parts, packed = vector.chunk(_PARTS), torch.empty_like(vector)
    calls: dict[str, Callable[[], object]] = {
        "all-reduce": lambda: group.add_up(torch.cat(parts, out=packed)),
        "reduce-scatter": lambda: group.reduce_scatter(torch.cat(parts, out=packed)),
        "all-gather": lambda: group.all_gather(vector[: len(vector) // size], packed),
        "all-to-all": lambda: group.all_to_all(vector, even_counts(size, len(vector))),
    }
    return calls[kind]


def _sample(prepare: Callable[[], Callable[[], object]]) -> list[CollectiveSample]:
    """Runs a call in another thread after compute in this one, as a worker does."""
    call, factor, samples = prepare(), torch.ones(_SIDE, _SIDE), []
    with ThreadPoolExecutor(1) as lane:
        for _ in range(1 + _REPEATS):
            factor @ factor
            start_s = time.perf_counter()
            cpu_s = lane.submit(_cpu_time, call).result()
            samples.append(CollectiveSample(time.perf_counter() - start_s, cpu_s))
    return samples[1:]  # the first makes the regions


def _cpu_time(call: Callable[[], object]) -> float:
    start_s = time.thread_time()
    call()
    return time.thread_time() - start_s


def _fit(kind: CollectiveKind, members: Sequence[list[list[CollectiveSample]]]) -> CollectiveTime:
    """Returns a line through both sizes: each takes the median over repeats of its last member's time."""
    small, large = (
        [CollectiveSample(min(s.wall_s for s in row), max(s.cpu_s for s in row)) for row in zip(*at_size, strict=True)]
        for at_size in zip(*members, strict=True)
    )
    small_s, large_s = (median(s.wall_s for s in samples) for samples in (small, large))
    cpu_s = median(s.cpu_s for s in large)
    bytes_s = max(large_s - small_s, LEAST_SHARE * large_s, 1e-9)
    return CollectiveTime(
        kind=kind,
        members=len(members),
        latency_s=small_s,
        bytes_per_s=LARGE_BYTES / bytes_s,
        core_share=min(1.0, cpu_s / large_s),
    )
