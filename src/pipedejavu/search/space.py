"""The space of a search: frames, each of which fixes all but the cuts and how many devices each stage has.

A frame is a row of devices, the sizes that a stage's group may have, the microbatches, and where state rests. Devices
that are alike are never exchanged; all other orders that matter are there as long as there are few.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from math import inf

from pipedejavu.facts import Device
from pipedejavu.search.cost import Costs
from pipedejavu.search.draft import PLAIN, Mode, Scene
from pipedejavu.search.option import Options

MOST_ORDERS = 120
"""Of devices that are not alike; beyond that, those of one kind and host stay together."""
MOST_FREE = 64
"""Devices of a row in which each stage may have a group of its own size."""
MOST_SIZES = 6
"""Of microbatches."""

_HOST_MODES = (
    Mode(activations="host"),
    Mode(state="host"),
    Mode(recomputes=True, state="host"),
    Mode(recomputes=True, state="window"),
    Mode(recomputes=True, activations="host", state="window"),
)


@dataclass(frozen=True)
class Frame:
    """What a searcher of cuts is given."""

    scene: Scene
    order: tuple[str, ...]
    sizes: tuple[int, ...]
    """Of groups; one alone makes all groups alike."""
    samples: int
    microbatches: int
    """Of an update, over all replicas."""
    mode: Mode
    is_stale: bool = False


def frames(scene: Scene, options: Options) -> Iterator[Frame]:
    """Yields all frames of a scene."""
    num_units, has_ties = len(scene.profile.units), bool(scene.profile.ties)
    for order in rows(scene):
        count = len(order)
        for size in (r for r in divisors(count) if count // r <= num_units and options.batch % r == 0):
            for row in _layouts(order, size):
                for samples in microbatch_sizes(options, size):
                    yield from _modes(scene, row, (size,), samples, options)
        if 1 < count <= MOST_FREE and not has_ties:
            for samples in microbatch_sizes(options, 1):
                sizes = tuple(r for r in divisors(options.batch // samples) if r < count)
                if len(sizes) > 1:
                    yield from _modes(scene, order, sizes, samples, options)


def _layouts(order: tuple[str, ...], size: int) -> list[tuple[str, ...]]:
    """Returns rows whose groups are neighbours, or as far apart as can be."""
    if size in (1, len(order)):
        return [order]
    stages = len(order) // size
    return [order, tuple(order[r * stages + s] for s in range(stages) for r in range(size))]


def _modes(
    scene: Scene, order: tuple[str, ...], sizes: tuple[int, ...], samples: int, options: Options
) -> Iterator[Frame]:
    machine, microbatches = scene.machine, options.batch // samples
    devices = [machine.device(name) for name in order]
    has_host = all(d.type == "gpu" for d in devices) and {d.host for d in devices} <= {
        d.host for d in machine.devices if d.type == "cpu" and all(d.kind in u.times for u in scene.profile.units)
    }
    modes = [PLAIN, Mode(recomputes=True), *(_HOST_MODES if has_host else ())]
    if not options.is_runnable and sizes[0] > 1 and len(sizes) == 1:
        modes += [Mode(recomputes=again, zero=zero) for zero in (1, 2, 3) for again in (False, True)]
    for mode in modes:
        yield Frame(scene, order, sizes, samples, microbatches, mode)
    if options.staleness and sizes[0] * 2 <= len(order) and microbatches // sizes[0] >= len(order) // sizes[0] - 1:
        for mode in modes[:2]:
            yield Frame(scene, order, sizes[:1], samples, microbatches, mode, is_stale=True)


def microbatch_sizes(options: Options, size: int) -> list[int]:
    """Returns the sizes of microbatches to try where `size` replicas share the batch, the largest first."""
    if options.samples is not None:
        return [options.samples] if options.batch // size % options.samples == 0 else []
    found = divisors(options.batch // size)[::-1]
    return (
        found
        if len(found) <= MOST_SIZES
        else [found[i * (len(found) - 1) // (MOST_SIZES - 1)] for i in range(MOST_SIZES)]
    )


def rows(scene: Scene) -> Iterator[tuple[str, ...]]:
    """Yields rows of devices: how many of each kind there are, in every order that matters."""
    alike: dict[tuple[object, ...], list[str]] = {}
    for name in scene.devices:
        alike.setdefault(_likeness(scene.machine.device(name)), []).append(name)
    classes = [*alike.values()]
    seen = set()
    for counts in _counts([len(names) for names in classes]):
        for row in _orders([names[:n] for names, n in zip(classes, counts, strict=True) if n]):
            if row not in seen:
                seen.add(row)
                yield row


def _likeness(device: Device) -> tuple[object, ...]:
    return device.kind, device.host, device.memory_bytes, device.reserved_bytes


def _counts(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields how many devices of each class to use: all ways where there are few, else whole classes."""
    ways = 1
    for size in sizes:
        ways *= size + 1
    if ways <= 64:
        yield from (counts for counts in product(*(range(size, -1, -1) for size in sizes)) if any(counts))
        return
    yield tuple(sizes)
    if len(sizes) == 1:
        yield from ((n,) for n in _halves(sizes[0]))
        return
    if len(sizes) <= 6:
        yield from (c for c in product(*((size, 0) for size in sizes)) if any(c) and c != tuple(sizes))
    else:
        yield from (tuple(sizes[:n]) + (0,) * (len(sizes) - n) for n in _halves(len(sizes)))
    yield from ((n,) + (0,) * (len(sizes) - 1) for n in _halves(sizes[0]))


def _halves(number: int) -> Iterator[int]:
    while number > 1:
        number //= 2
        yield number


def _orders(blocks: list[list[str]]) -> Iterator[tuple[str, ...]]:
    """Yields the orders of devices, of which those in one block are alike."""
    ways, placed = 1.0, 0
    for block in blocks:
        for n in range(len(block)):
            placed += 1
            ways *= placed / (n + 1)
    if ways <= MOST_ORDERS:
        labels = [index for index, block in enumerate(blocks) for _ in block]
        for order in sorted(set(permutations(labels))) if len(labels) <= 8 else [tuple(labels)]:
            left = [iter(block) for block in blocks]
            yield tuple(next(left[label]) for label in order)
    elif len(blocks) <= 4:
        for around in permutations(blocks):
            yield tuple(name for block in around for name in block)
    else:
        yield tuple(name for block in blocks for name in block)


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0] if number < 4096 else _factored(number)


def _factored(number: int) -> list[int]:
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def least_s(frame: Frame, costs: Costs) -> float:
    """Returns a time that no cut of a frame can be below, or infinity where its state cannot fit.

    With work w_d of a whole microbatch on device d, no cut handles microbatches faster than one in 1/Σ(1/w_d).
    """
    machine = frame.scene.machine
    kinds = Counter(machine.device(name).kind for name in frame.order)
    work = {kind: sum(float(costs.times(kind)[row][-1]) for row in range(2 + frame.mode.recomputes)) for kind in kinds}
    rate = sum(count / work[kind] if work[kind] else inf for kind, count in kinds.items())
    size = frame.sizes[0] if len(frame.sizes) == 1 else 1
    state = float(costs.weights[-1] + costs.gradients[-1]) if frame.mode.state != "window" else 0.0
    if frame.mode.zero == 3:
        state = float(costs.gradients[-1])
    if frame.mode.state == "device" and not frame.mode.zero:
        state += float(costs.optimizer[-1])
    rooms = [d.memory_bytes - d.reserved_bytes for d in map(machine.device, frame.order)]
    if sum(rooms) < state * size or max(rooms) < float(costs.gradients[-1]) * (size == len(rooms)):
        return inf
    if len(frame.sizes) > 1 or frame.is_stale:
        return frame.microbatches / rate
    slowest = size / rate
    return (
        min(work.values()) + (frame.microbatches / size - 1) * slowest if len(kinds) == 1 else frame.microbatches / rate
    )
