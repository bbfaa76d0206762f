"""The space of a search: frames, each of which fixes all but the cuts and how many devices each stage has.

A frame is a row of devices, the sizes that a stage's group may have, the microbatches, and where state rests. Devices
that are alike are never exchanged; all other orders that matter are there as long as there are few.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product

from pipedejavu.facts import Device
from pipedejavu.search.candidate_plan import PLAIN, CandidatePlan, Mode, PlanningProblem
from pipedejavu.search.search_options import SearchOptions
from pipedejavu.search.slot import DeviceOrder

MOST_ORDERS = 120
"""Of devices that are not alike; beyond that, those of one kind and host stay together."""
MOST_FREE = 16
"""Devices of a row in which each stage may have a group of its own size, and teams of its own size in it."""
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
class SearchSubspace:
    """What a searcher of cuts is given."""

    problem: PlanningProblem
    row: DeviceOrder
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


def subspaces(problem: PlanningProblem, options: SearchOptions) -> Iterator[SearchSubspace]:
    """Yields all frames of a scene."""
    if len(problem.degrees) > 1:
        yield from _frames_of_teams(problem, options)
        return
    num_units, has_ties = len(problem.profile.units), bool(problem.profile.ties)
    for order in device_orders(problem):
        count = len(order)
        modes = modes_of(problem, order, options)
        for size in (r for r in divisors(count) if count // r <= num_units and options.batch % r == 0):
            for layout in _layouts(order, size):
                row = DeviceOrder(problem, layout, size)
                for samples in microbatch_sizes(options, size):
                    yield from _frames(problem, row, (size,), samples, modes, options)
        if 1 < count <= MOST_FREE and not has_ties:
            free = DeviceOrder(problem, order)
            for samples in microbatch_sizes(options, 1):
                sizes = _free_sizes(problem, options, samples, count)
                if len(sizes) > 1:
                    yield from _frames(problem, free, sizes, samples, modes, options)


def subspace_of(candidate: CandidatePlan, options: SearchOptions) -> SearchSubspace:
    """Returns the frame that a draft is a cut of."""
    problem, degrees = candidate.problem, candidate.problem.degrees
    size = candidate.sizes[0] if candidate.is_even and len(degrees) == 1 else 0
    row = DeviceOrder(problem, candidate.devices, size)
    sizes = (size,) if size else _free_sizes(problem, options, candidate.samples, len(candidate.devices))
    return SearchSubspace(
        problem,
        row,
        sizes,
        candidate.samples,
        candidate.microbatches,
        candidate.mode,
        candidate.is_stale,
        degrees,
    )


def _free_sizes(problem: PlanningProblem, options: SearchOptions, samples: int, count: int) -> tuple[int, ...]:
    """Returns the sizes that groups of a row may have where each has its own; those that tie weights are alike."""
    most = 2 if problem.profile.ties else count
    return tuple(r for r in divisors(options.batch // samples) if r < most)


def _frames_of_teams(problem: PlanningProblem, options: SearchOptions) -> Iterator[SearchSubspace]:
    """Yields frames in which each stage has its own number of replicas, and its own number of devices for each."""
    modes = [Mode(recomputes=again, zero=zero) for zero in (0, 1) for again in (False, True)]
    for order in (row for row in device_orders(problem) if len(row) > 2):
        row = DeviceOrder(problem, order)
        for samples in microbatch_sizes(options, 1):
            sizes = _free_sizes(problem, options, samples, len(order))
            for mode in modes if len(sizes) > 1 else modes[:2]:
                yield SearchSubspace(
                    problem, row, sizes, samples, options.batch // samples, mode, degrees=problem.degrees
                )


def _layouts(order: tuple[str, ...], size: int) -> list[tuple[str, ...]]:
    """Returns rows whose groups are neighbours, or as far apart as can be."""
    if size in (1, len(order)):
        return [order]
    stages = len(order) // size
    return [order, tuple(order[r * stages + s] for s in range(stages) for r in range(size))]


def modes_of(problem: PlanningProblem, order: tuple[str, ...], options: SearchOptions) -> list[Mode]:
    """Returns the modes that make sense on a row of devices; those with ZeRO for groups of several."""
    modes = [PLAIN, Mode(recomputes=True), *(_HOST_MODES if has_hosts(problem, order) else ())]
    if not options.is_runnable:
        modes += [Mode(recomputes=again, zero=zero) for zero in (1, 2, 3) for again in (False, True)]
    return modes


def _frames(
    problem: PlanningProblem,
    row: DeviceOrder,
    sizes: tuple[int, ...],
    samples: int,
    modes: list[Mode],
    options: SearchOptions,
) -> Iterator[SearchSubspace]:
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
            yield SearchSubspace(problem, row, sizes, samples, microbatches, mode)
    stages = len(row.order) // sizes[0]
    if options.staleness and stages > 1 and microbatches // sizes[0] >= stages - 1:
        for mode in (PLAIN, Mode(recomputes=True)):
            yield SearchSubspace(problem, row, sizes[:1], samples, microbatches, mode, is_stale=True)


def has_hosts(problem: PlanningProblem, order: tuple[str, ...]) -> bool:
    """Whether all devices of a row are GPUs whose host has a CPU that the profile knows."""
    machine = problem.machine
    devices = [machine.device(name) for name in order]
    cpus = [d for d in machine.devices if d.type == "cpu" and all(d.kind in u.times for u in problem.profile.units)]
    return all(d.type == "gpu" for d in devices) and {d.host for d in devices} <= {d.host for d in cpus}


def microbatch_sizes(options: SearchOptions, size: int) -> list[int]:
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


def device_orders(problem: PlanningProblem) -> Iterator[tuple[str, ...]]:
    """Yields rows of devices: how many of each kind there are, in every order that matters."""
    devices = [problem.machine.device(name) for name in problem.devices]
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
            form = _form([problem.machine.device(name) for name in row], hosts)
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
