"""Schedules: the order in which one worker of a pipeline runs its forwards and backwards.

Each generator yields slots (kind, chunk, k): run `kind` on the worker's chunk for the k-th microbatch. It knows the
worker's rank, the number of workers p, of chunks per worker v and of microbatches m. It does not know pieces, time or
transport. In the pictures time runs to the right, a letter is a forward or a backward, the digit is its microbatch, and
p = 4.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from pipedejavu.program.action import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, ActionKind


class Slot(NamedTuple):
    """One forward or backward of a schedule."""

    kind: ActionKind
    chunk: int
    k: int


def step(rank: int, p: int, v: int, m: int) -> Iterator[Slot]:  # noqa: ARG001
    """Runs each microbatch forward and backward through all chunks of the worker before the next microbatch.

    F0 B0 F1 B1 F2 B2 …
    """
    for k in range(m):
        yield from (Slot(FORWARD, c, k) for c in range(v))
        yield from (Slot(BACKWARD, c, k) for c in reversed(range(v)))


def gpipe(rank: int, p: int, v: int, m: int) -> Iterator[Slot]:  # noqa: ARG001
    """Runs all forwards, then all backwards in the opposite order.

    r0 F0 F1 F2 F3 ..................... B3 B2 B1 B0
    r3          F0 F1 F2 F3 B3 B2 B1 B0
    """
    yield from (Slot(FORWARD, c, k) for c in range(v) for k in range(m))
    yield from (Slot(BACKWARD, c, k) for c in reversed(range(v)) for k in reversed(range(m)))


def layer_major(rank: int, p: int, v: int, m: int) -> Iterator[Slot]:  # noqa: ARG001
    """Runs all microbatches of a chunk together, so that a chunk's weights are fetched once per direction.

    F0a F1a F2a F0b F1b F2b B0b B1b B2b B0a B1a B2a
    """
    yield from (Slot(FORWARD, c, k) for c in range(v) for k in range(m))
    yield from (Slot(BACKWARD, c, k) for c in reversed(range(v)) for k in range(m))


def one_f_one_b(rank: int, p: int, v: int, m: int) -> Iterator[Slot]:  # noqa: ARG001
    """Alternates one forward and one backward once the pipeline is full.

    r0 F0F1F2 F3B0F4B1F5B2F6B3F7B4 B5B6B7
    r1 F0F1 F2B0F3B1F4B2F5B3F6B4F7B5 B6B7
    r2 F0 F1B0F2B1F3B2F4B3F5B4F6B5F7B6 B7
    r3 F0B0F1B1F2B2F3B3F4B4F5B5F6B6F7B7
    """
    yield from warmed_up(p - 1 - rank, m)


def warmed_up(warm_up: int, m: int) -> Iterator[Slot]:
    """Runs `warm_up` forwards, then pairs of a forward and a backward, then the remaining backwards."""
    ahead = min(warm_up, m)
    yield from (Slot(FORWARD, 0, k) for k in range(ahead))
    for k in range(ahead, m):
        yield Slot(FORWARD, 0, k)
        yield Slot(BACKWARD, 0, k - ahead)
    yield from (Slot(BACKWARD, 0, k) for k in range(m - ahead, m))


def interleaved(rank: int, p: int, v: int, m: int) -> Iterator[Slot]:
    """Runs 1F1B over v chunks per worker, p microbatches of a chunk at a time; needs m % p == 0.

    r0 F0aF1aF2aF3aF0bF1bF2bF3bF4aF5aF6aB0bF7aB1bF4bB2bF5bB3bF6bB0aF7bB1a…
    r3 F0aF1aF2aF3aF0bB0bF1bB1bF2bB2bF3bB3bF4aB0aF5aB1aF6aB2aF7aB3aF4bB4b…
    """

    def slot(kind: ActionKind, n: int) -> Slot:
        chunk = n % (p * v) // p
        return Slot(kind, chunk if kind == FORWARD else v - 1 - chunk, n // (p * v) * p + n % p)

    total = m * v
    ahead = min((v - 1) * p + 2 * (p - 1 - rank), total)
    yield from (slot(FORWARD, n) for n in range(ahead))
    for n in range(ahead, total):
        yield slot(FORWARD, n)
        yield slot(BACKWARD, n - ahead)
    yield from (slot(BACKWARD, n) for n in range(total - ahead, total))


def zb_h1(rank: int, p: int, v: int, m: int) -> Iterator[Slot]:
    """Runs 1F1B with split backwards; W is delayed by `rank` backwards and fills the bubble of 1F1B.

    r0 F0F1F2 F3I0W0F4I1W1F5I2W2F6I3W3F7I4W4 I5W5I6W6I7W7
    r3 F0I0F1I1F2I2F3I3W0F4I4W1F5I5W2F6I6W3F7I7W4 W5W6W7
    """
    for slot in one_f_one_b(rank, p, v, m):
        if slot.kind == FORWARD:
            yield slot
            continue
        yield Slot(INPUT_BACKWARD, 0, slot.k)
        if slot.k >= rank:
            yield Slot(WEIGHT_BACKWARD, 0, slot.k - rank)
    yield from (Slot(WEIGHT_BACKWARD, 0, k) for k in range(max(0, m - rank), m))


class _Chunks:
    """Numbers the slots of a V's two chunks: counts how many of each kind have run."""

    def __init__(self, m: int) -> None:
        self.m = m
        self.done = {(kind, c): 0 for kind in (FORWARD, BACKWARD) for c in (0, 1)}
        self.waiting: list[Slot] = []

    def forward(self, c: int) -> Slot:
        return Slot(FORWARD, c, self._next(FORWARD, c))

    def backward(self, c: int) -> Slot:
        return Slot(BACKWARD, c, self._next(BACKWARD, c))

    def input_half(self, c: int) -> Slot:
        """Returns the input half of the next backward and queues its weight half."""
        slot = Slot(INPUT_BACKWARD, c, self._next(BACKWARD, c))
        self.waiting.append(Slot(WEIGHT_BACKWARD, c, slot.k))
        return slot

    def weight_half(self, c: int | None = None) -> Slot:
        """Returns the oldest queued weight half, of one chunk or of either."""
        slot = next(s for s in self.waiting if c in (s.chunk, None))
        self.waiting.remove(slot)
        return slot

    def left(self, kind: ActionKind, c: int) -> int:
        return self.m - self.done[kind, c]

    def _next(self, kind: ActionKind, c: int) -> int:
        self.done[kind, c] += 1
        return self.done[kind, c] - 1


def zb_v(rank: int, p: int, v: int, m: int) -> Iterator[Slot]:  # noqa: ARG001
    """Runs a V of two chunks without bubbles after the ramp-up; needs m ≥ 2p − 1.

    r0 F0aF1aF2aF3aF4aF5aF6aF0bI0bW0bF1bI1bW1bF2bI2bW2bF3bI3bW3bF7aI0aW0aF4bI4bW4bI1aW1a…
    r3 F0aF0bF1aF1bF2aF2bF3aF3bI0bW0bF4aI0aW0aF4bI1bW1bF5aI1aW1aF5bI2bW2bF6aI2aW2aF6bI3bW3b…
    """
    run = _Chunks(m)
    yield from (run.forward(0) for _ in range(2 * (p - rank) - 1))
    for _ in range(rank):
        yield run.forward(1)
        yield run.forward(0)
    for _ in range(p - rank):
        yield from (run.forward(1), run.input_half(1), run.weight_half(1))
    while run.left(FORWARD, 1):
        if run.left(FORWARD, 0):
            yield run.forward(0)
        yield from (run.input_half(0), run.weight_half(0))
        yield from (run.forward(1), run.input_half(1), run.weight_half(1))
    for _ in range(rank):
        yield from (run.input_half(0), run.input_half(1))
    for _ in range(p - rank):
        yield from (run.input_half(0), run.weight_half(0))
    yield from sorted(run.waiting, key=lambda s: (-s.chunk, s.k))


def dualpipe_v(rank: int, p: int, v: int, m: int) -> Iterator[Slot]:  # noqa: ARG001
    """Runs a V of two chunks, pairing one chunk's forward with the other's backward; needs m ≥ 2p.

    r0 F0aF1aF2aF3aF4aF5aF6aF0bI0bW0bF1bI1bW1bF2bI2bW2bF3bF7aB3bF4bB0aB4bF5bB1aB5bF6bB2a…
    r3 F0aF0bF1aF1bF2aF2bF3aF3bF4aB0bF4bB0aF5aB1bF5bB1aF6aB2bF6bB2aF7aB3bF7bB3aB4bB4aB5bB5a…
    """
    run, rest = _Chunks(m), p - rank - 1
    yield from (run.forward(0) for _ in range(2 * rest))
    for _ in range(rank + 1):
        yield from (run.forward(0), run.forward(1))
    for _ in range(rest):
        yield from (run.input_half(1), run.weight_half(), run.forward(1))
    for _ in range(m - 2 * p + rank + 1):
        yield from (run.forward(0), run.backward(1), run.forward(1), run.backward(0))
    for _ in range(rest):
        yield from (run.backward(1), run.forward(1), run.backward(0))
    for n in range(2 * (rank + 1)):
        yield run.backward(1 - n % 2) if n <= rank else run.input_half(1 - n % 2)
    for _ in range(rest):
        yield from (run.weight_half(), run.input_half(0))
    yield from tuple(run.waiting)


def gems(rank: int, p: int, v: int, m: int) -> Iterator[Slot]:  # noqa: ARG001
    """Alternates between two replicas in opposite directions; chunk 0 is A, chunk 1 is B.

    r0 A A .................... B B B A A     one batch forward and backward, then the other:
    r3       A A A B B .................      B starts on the worker that A's backward has just left
    """
    for k in range(m):
        yield Slot(FORWARD, k % 2, k)
        yield Slot(BACKWARD, k % 2, k)


def chimera(rank: int, p: int, v: int, m: int) -> Iterator[Slot]:  # noqa: ARG001
    """Merges two pipelines in opposite directions, each with p/2 microbatches at a time; p is even.

    In units of one slot, the k-th microbatch of a direction runs its forward on stage s at time 2k + s and its backward
    at 2k + 2p − 1 − s, so the two directions use times of opposite parity. The next p microbatches start 2p later.

    r0 F0dF1dF2uB2uF3uB3uB0d F4dB1d F5dF6uB6uF7uB7uB4dB5d
    r1 F0dF2uF1dF3uB2uB0dB3uB1d F4dF6uF5dF7uB6uB4dB7uB5d
    """
    slots = []
    for first in range(0, m, p):
        size = min(p, m - first)
        for n in range(size):
            down = n < (size + 1) // 2
            k, stage = (n, rank) if down else (n - (size + 1) // 2, p - 1 - rank)
            at = 2 * first + 2 * k
            slots.append((at + stage, Slot(FORWARD, 1 - down, first + n)))
            slots.append((at + 2 * p - 1 - stage, Slot(BACKWARD, 1 - down, first + n)))
    yield from (slot for _, slot in sorted(slots))


Schedule = Callable[[int, int, int, int], Iterator[Slot]]

SCHEDULES: dict[str, Schedule] = {
    "step": step,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "1f1b-async": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
    "gems": gems,
    "chimera": chimera,
    "layer-major": layer_major,
    "ready-first": one_f_one_b,
}
"""By the plan's `order.kind`. A ready-first worker runs its slots as they become ready, in any order."""
