"""The space of a search: frames, each of which fixes all but the cuts and how many devices each stage has.

A frame is a row of devices, the sizes that a stage's group may have, the microbatches, and where state rests. Devices
that are alike are never exchanged; all other orders that matter are there as long as there are few.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, permutations, product
from math import inf

import numpy as np

from pipedejavu.facts import Device
from pipedejavu.search.cost import Costs
from pipedejavu.search.draft import PLAIN, Draft, Mode, Scene
from pipedejavu.search.option import Options
from pipedejavu.search.seat import Place, Row

MOST_ORDERS = 120
"""Of devices that are not alike; beyond that, those of one kind and host stay together."""
MOST_FREE = 16
"""Devices of a row in which each stage may have a group of its own size, and teams of its own size in it."""
MOST_SIZES = 6
"""Of microbatches."""
HALVINGS = 10
"""Of the interval in which the time of the longest stage of the most even cut lies."""

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
    row: Row
    sizes: tuple[int, ...]
    """Of groups; one alone makes all groups alike."""
    samples: int
    microbatches: int
    """Of an update, over all replicas."""
    mode: Mode
    is_stale: bool = False
    degrees: tuple[int, ...] = (1,)
    """Of teams; several let each stage have its own."""

    @property
    def order(self) -> tuple[str, ...]:
        """The devices of the row."""
        return self.row.order

    @property
    def is_free(self) -> bool:
        """Whether stages may have groups that are not alike."""
        return len(self.sizes) * len(self.degrees) > 1

    @property
    def zeros(self) -> tuple[int, ...]:
        """The ZeRO stages that a stage with replicas may have."""
        is_one = self.sizes == (len(self.order),)
        return (self.mode.zero,) if is_one or not self.mode.zero else (0, self.mode.zero)

    def groups(self, after: int) -> Iterator[tuple[int, int]]:
        """Yields the replicas that a stage with `after` devices behind it may have, and the devices of each."""
        for size, shards in product(self.sizes, self.degrees):
            if self.row.has_teams(after, size, shards):
                yield size, shards

    def seatings(self, most: int, after: int = 0) -> Iterator[tuple[tuple[int, int], ...]]:
        """Yields all ways to divide the devices into at most `most` groups, from the first stage to the last."""
        if after == len(self.order):
            yield ()
        elif most:
            for size, shards in self.groups(after):
                for before in self.seatings(most - 1, after + size * shards):
                    yield *before, (size, shards)


def frames(scene: Scene, options: Options) -> Iterator[Frame]:
    """Yields all frames of a scene."""
    if len(scene.degrees) > 1:
        yield from _frames_of_teams(scene, options)
        return
    num_units, has_ties = len(scene.profile.units), bool(scene.profile.ties)
    for order in rows(scene):
        count = len(order)
        modes = modes_of(scene, order, options)
        for size in (r for r in divisors(count) if count // r <= num_units and options.batch % r == 0):
            for layout in _layouts(order, size):
                row = Row(scene, layout, size)
                for samples in microbatch_sizes(options, size):
                    yield from _frames(scene, row, (size,), samples, modes, options)
        if 1 < count <= MOST_FREE and not has_ties:
            free = Row(scene, order)
            for samples in microbatch_sizes(options, 1):
                sizes = _free_sizes(scene, options, samples, count)
                if len(sizes) > 1:
                    yield from _frames(scene, free, sizes, samples, modes, options)


def frame_of(draft: Draft, options: Options) -> Frame:
    """Returns the frame that a draft is a cut of."""
    scene, degrees = draft.scene, draft.scene.degrees
    size = draft.sizes[0] if draft.is_even and len(degrees) == 1 else 0
    row = Row(scene, draft.devices, size)
    sizes = (size,) if size else _free_sizes(scene, options, draft.samples, len(draft.devices))
    return Frame(scene, row, sizes, draft.samples, draft.microbatches, draft.mode, draft.is_stale, degrees)


def _free_sizes(scene: Scene, options: Options, samples: int, count: int) -> tuple[int, ...]:
    """Returns the sizes that groups of a row may have where each has its own; those that tie weights are alike."""
    most = 2 if scene.profile.ties else count
    return tuple(r for r in divisors(options.batch // samples) if r < most)


def _frames_of_teams(scene: Scene, options: Options) -> Iterator[Frame]:
    """Yields frames in which each stage has its own number of replicas, and its own number of devices for each."""
    modes = [Mode(recomputes=again, zero=zero) for zero in (0, 1) for again in (False, True)]
    for order in (row for row in rows(scene) if len(row) > 2):
        row = Row(scene, order)
        for samples in microbatch_sizes(options, 1):
            sizes = _free_sizes(scene, options, samples, len(order))
            for mode in modes if len(sizes) > 1 else modes[:2]:
                yield Frame(scene, row, sizes, samples, options.batch // samples, mode, degrees=scene.degrees)


def _layouts(order: tuple[str, ...], size: int) -> list[tuple[str, ...]]:
    """Returns rows whose groups are neighbours, or as far apart as can be."""
    if size in (1, len(order)):
        return [order]
    stages = len(order) // size
    return [order, tuple(order[r * stages + s] for s in range(stages) for r in range(size))]


def modes_of(scene: Scene, order: tuple[str, ...], options: Options) -> list[Mode]:
    """Returns the modes that make sense on a row of devices; those with ZeRO for groups of several."""
    modes = [PLAIN, Mode(recomputes=True), *(_HOST_MODES if has_hosts(scene, order) else ())]
    if not options.is_runnable:
        modes += [Mode(recomputes=again, zero=zero) for zero in (1, 2, 3) for again in (False, True)]
    return modes


def _frames(
    scene: Scene, row: Row, sizes: tuple[int, ...], samples: int, modes: list[Mode], options: Options
) -> Iterator[Frame]:
    microbatches, divides = options.batch // samples, sizes[0] > 1 and len(sizes) == 1
    is_alone = sizes[0] == len(row.order)
    for mode in modes:
        # By the estimate checkpoints that came from another worker do not wait on the host.
        is_possible = is_alone or not (mode.recomputes and mode.activations == "host")
        # Gradients that several microbatches add to are held whole, divided or not; and so are weights in a pipeline,
        # where ZeRO-3 takes as long as ZeRO-1 by the estimate (`Pool.polish` tries it).
        is_possible &= mode.zero != 2 or microbatches == sizes[0]
        is_possible &= mode.zero != 3 or is_alone
        if is_possible and (divides or not mode.zero):
            yield Frame(scene, row, sizes, samples, microbatches, mode)
    stages = len(row.order) // sizes[0]
    if options.staleness and stages > 1 and microbatches // sizes[0] >= stages - 1:
        for mode in (PLAIN, Mode(recomputes=True)):
            yield Frame(scene, row, sizes[:1], samples, microbatches, mode, is_stale=True)


def has_hosts(scene: Scene, order: tuple[str, ...]) -> bool:
    """Whether all devices of a row are GPUs whose host has a CPU that the profile knows."""
    machine = scene.machine
    devices = [machine.device(name) for name in order]
    cpus = [d for d in machine.devices if d.type == "cpu" and all(d.kind in u.times for u in scene.profile.units)]
    return all(d.type == "gpu" for d in devices) and {d.host for d in devices} <= {d.host for d in cpus}


def microbatch_sizes(options: Options, size: int) -> list[int]:
    """Returns the sizes of microbatches to try where `size` replicas share the batch, the largest first."""
    if options.objective == "batch":
        return [options.batch // size] if options.batch % size == 0 else []
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
    devices = [scene.machine.device(name) for name in scene.devices]
    if len(devices) > MOST_FREE and any(d.type == "gpu" for d in devices):
        devices = [d for d in devices if d.type == "gpu"]  # among so many, CPUs keep state and train none
    alike: dict[tuple[object, ...], list[str]] = {}
    for device in devices:
        alike.setdefault(_likeness(device), []).append(device.name)
    classes = [*alike.values()]
    hosts = _host_signatures(devices)
    seen: set[tuple[object, ...]] = set()
    for counts in _counts([len(names) for names in classes]):
        for row in _orders([names[:n] for names, n in zip(classes, counts, strict=True) if n]):
            form = _form([scene.machine.device(name) for name in row], hosts)
            if form not in seen:
                seen.add(form)
                yield row


def _host_signatures(devices: Sequence[Device]) -> dict[str, tuple[object, ...]]:
    """Returns what each host has; hosts that have the same may change places."""
    found: dict[str, list[tuple[object, ...]]] = {}
    for device in devices:
        found.setdefault(device.host, []).append((device.kind, device.memory_bytes, device.reserved_bytes))
    return {host: tuple(sorted(parts)) for host, parts in found.items()}


def _form(row: Sequence[Device], hosts: dict[str, tuple[object, ...]]) -> tuple[object, ...]:
    """Returns a row with its hosts numbered as they come, so that rows which differ by like hosts are equal."""
    number: dict[str, int] = {}
    for device in row:
        number.setdefault(device.host, len(number))
    return tuple((d.kind, d.memory_bytes, d.reserved_bytes, number[d.host], hosts[d.host]) for d in row)


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


@cache
def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0] if number < 4096 else _factored(number)


def _factored(number: int) -> list[int]:
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


class Bounds:
    """Times that no cut of a frame can be below."""

    def __init__(self) -> None:
        self._rows: dict[Row, tuple[Counter[str], float, float]] = {}
        self._times: dict[tuple[object, ...], float] = {}
        self._longest: dict[tuple[int, str, int], float] = {}

    def least_s(self, frame: Frame, costs: Costs) -> float:
        """Returns such a time, or infinity where the state cannot fit."""
        kinds, room, rooms = self._row(frame)
        mode, size = frame.mode, 1 if frame.is_free else frame.sizes[0]
        weights, gradients, optimizer = costs.state_bytes
        state = gradients + (weights if mode.state != "window" and mode.zero < 3 else 0.0)
        if mode.state == "device" and not mode.zero:
            state += optimizer
        if rooms < state * size or (size == len(frame.order) and room < state):
            return inf
        key = (frame.row, frame.sizes, frame.samples, frame.is_stale, mode.zero > 0)
        if key not in self._times:
            self._times[key] = self._least_s(frame, costs, kinds, size)
        return self._times[key]

    def _least_s(self, frame: Frame, costs: Costs, kinds: Counter[str], size: int) -> float:
        work = {kind: sum(float(costs.times(kind)[row][-1]) for row in (0, 1)) for kind in kinds}
        stages = len(frame.order) // size
        if frame.is_free or frame.is_stale or (len(kinds) > 1 and stages > 1):
            return _mixed_s(frame, costs, kinds)
        if stages == 1:
            place = frame.row.place(0, size)
            hidden = max(sum(float(costs.times(kind)[row][-1]) for row in (1, 2)) for kind in kinds)
            reduced = _reduced_s(place, size, costs, frame.mode)
            return frame.microbatches // size * max(work.values()) + max(reduced - hidden, 0.0)
        # All groups are alike: the slowest stage is that of the most even cut, and each cut sends the least there is.
        kind, share = next(iter(kinds)), frame.microbatches // size
        places = [frame.row.place(after, size) for after in range(0, len(frame.order), size)]
        sent = sum(place.next.latency_s + place.next.byte_s * float(costs.cut[1:-1].min()) for place in places[1:])
        around = work[kind] + 2 * sent
        reduced = min(_reduced_s(place, size, costs, frame.mode) for place in places)
        mean = max(((share - 1) * work[kind] + reduced), min(p.crowd for p in places) * reduced) / stages
        slowest = (share - 1) * self._even_s(costs, kind, stages)
        return around + max(mean, slowest, (share - 1) // min(stages, share) * around)

    def _even_s(self, costs: Costs, kind: str, stages: int) -> float:
        """Returns what the longest of so many stages takes for a microbatch at least, however they are cut."""
        key = (id(costs), kind, stages)
        if key not in self._longest:
            ends = (costs.times(kind)[0] + costs.times(kind)[1]).tolist()
            largest = max(b - a for a, b in pairwise(ends))
            low, high = max(ends[-1] / stages, largest), ends[-1] / stages + largest
            for _ in range(HALVINGS if high > low else 0):
                middle = (low + high) / 2
                low, high = (low, middle) if _is_cut(ends, stages, middle) else (middle, high)
            self._longest[key] = low
        return self._longest[key]

    def _row(self, frame: Frame) -> tuple[Counter[str], float, float]:
        """Returns how many devices of each kind a row has, the least room of one and the room of all."""
        if frame.row not in self._rows:
            devices = frame.row.devices
            rooms = [float(d.memory_bytes - d.reserved_bytes) for d in devices]
            self._rows[frame.row] = Counter(d.kind for d in devices), max(rooms), sum(rooms)
        return self._rows[frame.row]


def _mixed_s(frame: Frame, costs: Costs, kinds: Counter[str]) -> float:
    """Returns what stages on groups of any size, or on devices of several kinds, take at least.

    Say that a whole microbatch takes w on a device. Stage k with g devices takes t for a microbatch and adds at least
    z = (m/g − 1)·t for its part of m. So Σ z/w over all devices is no less than Σ (m − g)·t/w over stages, and the
    largest z no less than (m − max g)·v / Σ 1/w, where v adds up for each unit the least of its parts of the w; beside
    it each unit takes its time once. A team of d devices takes t/d at least, and counts d times in the sum: so the same
    holds with g teams.
    """
    each = {kind: np.diff(costs.times(kind)[0] + costs.times(kind)[1]) for kind in kinds}
    work = {kind: float(times.sum()) for kind, times in each.items()}
    if not all(work.values()):
        return 0.0
    all_s = float(np.min([each[kind] / work[kind] for kind in kinds], axis=0).sum())
    all_s /= sum(count / work[kind] for kind, count in kinds.items())
    many, largest, together = frame.microbatches, max(frame.sizes), max(frame.degrees)
    # Every device, or team, has a unit at least.
    least = max(many * all_s, many // largest * max(float(times.min()) for times in each.values()) / together)
    once = float(np.min([*each.values()], axis=0).sum()) / together
    return least if frame.is_stale else max(least, once + (many - largest) * all_s)


def _is_cut(ends: list[float], stages: int, most: float) -> bool:
    """Whether so many stages, each with as much as it may have, take all units."""
    at = 0
    for _ in range(stages):
        at = bisect_right(ends, ends[at] + most) - 1
    return at == len(ends) - 1


def _reduced_s(place: Place, size: int, costs: Costs, mode: Mode) -> float:
    """Returns what it takes at least to add up all gradients around a ring."""
    return (size - 1) / size * costs.state_bytes[1] * (1 if mode.zero else 2) * place.ring.byte_s
