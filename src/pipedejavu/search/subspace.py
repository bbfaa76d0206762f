"""Search subspaces: each fixes everything but the cuts and the number of devices per stage.

A subspace is an order of devices, the sizes that a stage's group may have, the microbatches, and where state rests.
Equal devices are never exchanged; all other orders are searched as long as they are few.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations, product

from pipedejavu.facts import Device
from pipedejavu.search.candidate_plan import PLAIN, CandidatePlan, Mode, PlanningProblem
from pipedejavu.search.search_options import SearchOptions
from pipedejavu.search.slot import DeviceOrder

MOST_ORDERS = 120
"""Orders of unequal devices up to which all are searched; if there are more, equal devices mostly stay together."""
MOST_FREE = 16
"""Devices up to which each stage may choose its number of replicas and its tensor-parallel degree."""
MOST_SIZES = 6
"""Sizes of microbatches tried."""

_HOST_MODES = (
    Mode(activations="host"),
    Mode(state="host"),
    Mode(recomputes=True, state="host"),
    Mode(recomputes=True, state="window"),
    Mode(recomputes=True, activations="host", state="window"),
)


@dataclass(frozen=True)
class SearchSubspace:
    """A part of the search space in which only cuts, groups and ZeRO are free."""

    problem: PlanningProblem
    device_order: DeviceOrder
    sizes: tuple[int, ...]
    """Replicas that a stage may have; a single size makes all groups equal."""
    samples: int
    """Samples per microbatch."""
    microbatches: int
    """Microbatches per update, over all replicas."""
    mode: Mode
    is_stale: bool = False
    degrees: tuple[int, ...] = (1,)
    """Tensor-parallel degrees that each stage may choose from."""

    @property
    def order(self) -> tuple[str, ...]:
        """The devices, from the first stage to the last."""
        return self.device_order.order

    @property
    def key_without_recompute(self) -> tuple[object, ...]:
        """A key that this subspace shares with the one that differs only in recompute."""
        mode = replace(self.mode, recomputes=False)
        return self.device_order, self.sizes, self.samples, self.degrees, self.is_stale, mode

    @property
    def is_free(self) -> bool:
        """Whether stages may have unequal groups."""
        return len(self.sizes) * len(self.degrees) > 1

    @property
    def zeros(self) -> tuple[int, ...]:
        """The ZeRO stages that a pipeline stage with replicas may have; stages with tied weights divide them alike."""
        is_one = self.sizes == (len(self.order),) or bool(self.problem.profile.ties)
        return (self.mode.zero,) if is_one or not self.mode.zero else (0, self.mode.zero)

    def groups(self, after: int) -> Iterator[tuple[int, int]]:
        """Yields possible numbers of replicas, and of devices per replica, for a stage that `after` devices follow."""
        for size, shards in product(self.sizes, self.degrees):
            if self.device_order.has_slot(after, size, shards):
                yield size, shards

    def groupings(self, most: int, after: int = 0) -> Iterator[tuple[tuple[int, int], ...]]:
        """Yields all divisions of the devices into at most `most` groups, from the first stage to the last."""
        if after == len(self.order):
            yield ()
        elif most:
            for size, shards in self.groups(after):
                for before in self.groupings(most - 1, after + size * shards):
                    yield *before, (size, shards)


def subspaces(problem: PlanningProblem, options: SearchOptions) -> Iterator[SearchSubspace]:
    """Yields all subspaces of a planning problem."""
    if len(problem.degrees) > 1:
        yield from _tp_subspaces(problem, options)
        return
    num_units, has_ties = len(problem.profile.units), bool(problem.profile.ties)
    for order in device_orders(problem):
        count = len(order)
        divides = options.precision.moments != "int8"  # a rule says why
        modes = [mode for mode in modes_of(problem, order) if divides or not mode.zero]
        for size in (r for r in divisors(count) if count // r <= num_units and options.batch % r == 0):
            for layout in _layouts(order, size):
                device_order = DeviceOrder(problem, layout, size)
                for samples in microbatch_sizes(options, size):
                    yield from _order_subspaces(problem, device_order, (size,), samples, modes, options)
        is_run = not (options.is_runnable and problem.tp_groups)  # the engine runs no groups beside unequal replicas
        if 1 < count <= MOST_FREE and not has_ties and is_run:
            free = DeviceOrder(problem, order)
            for samples in microbatch_sizes(options, 1):
                sizes = _free_sizes(problem, options, samples, count)
                if len(sizes) > 1:
                    yield from _order_subspaces(problem, free, sizes, samples, modes, options)


def subspace_of(candidate: CandidatePlan, options: SearchOptions, *, may_regroup: bool = False) -> SearchSubspace:
    """Returns the subspace that holds a candidate; if it `may_regroup` the one with free groups, if there is one."""
    problem, degrees, count = candidate.problem, candidate.problem.degrees, len(candidate.devices)
    may_regroup &= 1 < count <= MOST_FREE and not problem.profile.ties and candidate.mode.zero == 0
    size = candidate.sizes[0] if candidate.is_even and len(degrees) == 1 and not may_regroup else 0
    device_order = DeviceOrder(problem, candidate.devices, size)
    sizes = (size,) if size else _free_sizes(problem, options, candidate.samples, len(candidate.devices))
    return SearchSubspace(
        problem,
        device_order,
        sizes,
        candidate.samples,
        candidate.microbatches,
        candidate.mode,
        candidate.is_stale,
        degrees,
    )


def _free_sizes(problem: PlanningProblem, options: SearchOptions, samples: int, count: int) -> tuple[int, ...]:
    """Returns the numbers of replicas that stages may choose from; only 1 if the model ties weights across units.

    Replicas need not divide the microbatches. All devices can be one stage here only if they do not; else another
    subspace has them.
    """
    microbatches = options.batch // samples
    most = 1 if problem.profile.ties else min(count, microbatches)
    return tuple(r for r in range(1, most + 1) if r < count or microbatches % r)


def _tp_subspaces(problem: PlanningProblem, options: SearchOptions) -> Iterator[SearchSubspace]:
    """Yields subspaces in which each stage chooses its replicas and its tensor-parallel degree."""
    modes = [Mode(recomputes=again, zero=zero) for zero in (0, 1) for again in (False, True)]
    for order in (order for order in device_orders(problem) if len(order) > 2):
        device_order = DeviceOrder(problem, order)
        for samples in microbatch_sizes(options, 1):
            sizes = tuple(r for r in _free_sizes(problem, options, samples, len(order)) if r < len(order))
            for mode in modes if len(sizes) > 1 else modes[:2]:
                yield SearchSubspace(
                    problem, device_order, sizes, samples, options.batch // samples, mode, degrees=problem.degrees
                )


def _layouts(order: tuple[str, ...], size: int) -> list[tuple[str, ...]]:
    """Returns the order with the replicas of a stage next to each other, and with them as far apart as possible."""
    if size in (1, len(order)):
        return [order]
    stages = len(order) // size
    return [order, tuple(order[r * stages + s] for s in range(stages) for r in range(size))]


def modes_of(problem: PlanningProblem, order: tuple[str, ...]) -> list[Mode]:
    """Returns the modes to try on these devices; modes with ZeRO are for groups of several."""
    modes = [Mode(recomputes=True), PLAIN, *(_HOST_MODES if has_hosts(problem, order) else ())]
    return modes + [Mode(recomputes=again, zero=zero) for zero in (1, 2, 3) for again in (False, True)]


def _order_subspaces(
    problem: PlanningProblem,
    device_order: DeviceOrder,
    sizes: tuple[int, ...],
    samples: int,
    modes: list[Mode],
    options: SearchOptions,
) -> Iterator[SearchSubspace]:
    """Yields the subspaces of one order of devices, one per mode."""
    microbatches, divides = options.batch // samples, sizes[0] > 1 and len(sizes) == 1
    is_alone = sizes[0] == len(device_order.order)
    for mode in modes:
        # The estimate does not cover checkpoints on the host that another worker sent.
        is_possible = is_alone or not (mode.recomputes and mode.activations == "host")
        # Gradients accumulated over several microbatches are held whole under any ZeRO stage, and so are weights in a
        # pipeline: there the estimate of ZeRO-3 equals that of ZeRO-1 (`Pool.polish` tries it).
        is_possible &= mode.zero != 2 or microbatches == sizes[0]
        is_possible &= mode.zero != 3 or is_alone
        if is_possible and (divides or not mode.zero):
            yield SearchSubspace(problem, device_order, sizes, samples, microbatches, mode)
    stages = len(device_order.order) // sizes[0]
    if options.staleness and stages > 1 and microbatches // sizes[0] >= stages - 1:
        for mode in (PLAIN, Mode(recomputes=True)):
            yield SearchSubspace(problem, device_order, sizes[:1], samples, microbatches, mode, is_stale=True)


def has_hosts(problem: PlanningProblem, order: tuple[str, ...]) -> bool:
    """Whether all devices are GPUs on hosts with a CPU that the profile has times for."""
    machine = problem.machine
    devices = [machine.device(name) for name in order]
    cpus = [d for d in machine.devices if d.type == "cpu" and all(d.kind in u.times for u in problem.profile.units)]
    return all(d.type == "gpu" for d in devices) and {d.host for d in devices} <= {d.host for d in cpus}


def microbatch_sizes(options: SearchOptions, size: int) -> list[int]:
    """Returns the samples per microbatch to try if `size` replicas share the batch, the largest first."""
    if options.objective == "batch":
        return [options.batch // size] if options.batch % size == 0 else []
    if options.samples is not None:
        return [options.samples] if options.batch // size % options.samples == 0 else []
    sizes = divisors(options.batch // size)[::-1]
    if len(sizes) <= MOST_SIZES:
        return sizes
    return [sizes[i * (len(sizes) - 1) // (MOST_SIZES - 1)] for i in range(MOST_SIZES)]


def device_orders(problem: PlanningProblem) -> Iterator[tuple[str, ...]]:
    """Yields selections of the devices, each in every order that can change the cost."""
    devices = [problem.machine.device(name) for name in problem.devices]
    if len(devices) > MOST_FREE and any(d.type == "gpu" for d in devices):
        devices = [d for d in devices if d.type == "gpu"]  # among so many devices, CPUs hold state and do not train
    equal: dict[tuple[object, ...], list[str]] = {}
    for device in devices:
        equal.setdefault(_device_key(device), []).append(device.name)
    classes = [*equal.values()]
    hosts = _host_signatures(devices)
    seen: set[tuple[object, ...]] = set()
    for counts in _counts([len(names) for names in classes]):
        for order in _orders([names[:n] for names, n in zip(classes, counts, strict=True) if n]):
            key = _order_key([problem.machine.device(name) for name in order], hosts)
            if key not in seen:
                seen.add(key)
                yield order


def _host_signatures(devices: Sequence[Device]) -> dict[str, tuple[object, ...]]:
    """Returns the devices of each host; hosts with equal signatures are interchangeable."""
    signatures: dict[str, list[tuple[object, ...]]] = {}
    for device in devices:
        signatures.setdefault(device.host, []).append((device.kind, device.memory_bytes, device.reserved_bytes))
    return {host: tuple(sorted(parts)) for host, parts in signatures.items()}


def _order_key(order: Sequence[Device], hosts: dict[str, tuple[object, ...]]) -> tuple[object, ...]:
    """Returns a key with hosts numbered by first appearance: orders that differ only by equal hosts share it."""
    number: dict[str, int] = {}
    for device in order:
        number.setdefault(device.host, len(number))
    return tuple((d.kind, d.memory_bytes, d.reserved_bytes, number[d.host], hosts[d.host]) for d in order)


def _device_key(device: Device) -> tuple[object, ...]:
    return device.kind, device.host, device.memory_bytes, device.reserved_bytes


def _counts(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields how many devices of each class to use: all combinations if they are few, else whole classes."""
    combinations = 1
    for size in sizes:
        combinations *= size + 1
    if combinations <= 64:
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
    """Yields the orders of devices; those in one block are equal and keep their order.

    If there are too many, the devices of a block stay together, and in the orders of two or three blocks one of them
    may also divide another in quarters.
    """
    num_orders, placed = 1.0, 0
    for block in blocks:
        for n in range(len(block)):
            placed += 1
            num_orders *= placed / (n + 1)
    if num_orders <= MOST_ORDERS:
        for labels in _arrangements([len(block) for block in blocks]):
            left = [iter(block) for block in blocks]
            yield tuple(next(left[label]) for label in labels)
    elif len(blocks) <= 4:
        for around in permutations(blocks):
            yield tuple(name for block in around for name in block)
            for at in range(len(around) - 1) if len(blocks) <= 3 else ():
                before, outer, inner, after = around[:at], around[at], around[at + 1], around[at + 2 :]
                for cut in sorted({len(outer) * n // 4 for n in (1, 2, 3)} - {0, len(outer)}):
                    divided = (*before, outer[:cut], inner, outer[cut:], *after)
                    yield tuple(name for block in divided for name in block)
    else:
        yield tuple(name for block in blocks for name in block)


def _arrangements(counts: list[int]) -> Iterator[tuple[int, ...]]:
    """Yields the sequences in which each number appears as often as `counts` says, in ascending order."""
    if not any(counts):
        yield ()
    for label, count in enumerate(counts):
        if count:
            for rest in _arrangements([n - (i == label) for i, n in enumerate(counts)]):
                yield label, *rest


@cache
def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0] if number < 4096 else _factored(number)


def _factored(number: int) -> list[int]:
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})
