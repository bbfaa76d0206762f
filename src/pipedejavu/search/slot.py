"""Slots: consecutive devices that a stage may take, with their links, the host that they use, and their memory."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipedejavu.facts import Device, InputError, Machine, Route
from pipedejavu.program.tp_group import are_tp_group, tp_kind
from pipedejavu.search.candidate_plan import Array, PlanningProblem


class SlotLink(NamedTuple):
    """The cost of a transfer, and how much other traffic uses the same wires."""

    latency_s: float
    byte_s: float
    """Seconds per byte."""
    contention: float = 1.0
    """Traffic of all slots on the busiest wire, as a multiple of this slot's own."""

    def time(self, size_bytes: Array) -> Array:
        """Returns the time of messages; an empty message takes none."""
        return np.where(size_bytes > 0, self.latency_s + size_bytes * self.byte_s, 0.0)

    def turn(self, size: int, size_bytes: Array, messages: Array) -> Array:
        """Returns the time of one pass around a ring of `size` devices: a reduce-scatter or an all-gather."""
        return np.asarray((size - 1) * (messages * self.latency_s + size_bytes / size * self.byte_s))


FREE = SlotLink(0.0, 0.0)


class SlotHost(NamedTuple):
    """The host of a slot's devices: the link to it, and the CPU that updates for them."""

    link: SlotLink
    """The slowest link between a device and its host, in either direction."""
    cpu: str
    """Kind of the host's CPU; empty if the host lists none."""
    updaters: int
    """Workers of the slot that share one CPU for their updates."""
    cpu_contention: float
    """Devices of all slots on that CPU's host, as a multiple of this slot's own."""


class SlotMemory(NamedTuple):
    """Memory limits of one worker."""

    device_bytes: float
    host_bytes: float
    """The worker's part of its host's memory."""


class StageSlot(NamedTuple):
    """Consecutive devices for one stage, whatever units the stage holds."""

    group: tuple[str, ...]
    """The first device of each tensor-parallel group; each group holds the whole stage."""
    kinds: tuple[str, ...]
    """The distinct kinds of these devices or tensor-parallel groups."""
    after: int
    """Devices after the slot."""
    is_alone: bool
    """Whether the slot takes all devices, so that reductions overlap with the backward pass."""
    ring: SlotLink
    """The ring around which the group reduces its gradients."""
    next: SlotLink
    """The link to the next stage."""
    host: SlotHost
    memory: SlotMemory

    def cost_key(self) -> tuple[object, ...]:
        """Returns a key: stages in slots with equal keys cost the same if they hold as many live microbatches."""
        return (len(self.group), self.kinds, *self[3:])


class ScheduledSlot(NamedTuple):
    """A slot and its part of the 1F1B schedule."""

    slot: StageSlot
    microbatches: int
    """Microbatches per device and update; the most, if the devices of a slot cannot have the same number."""
    live: int
    """Microbatches per device between their forward and their backward."""
    is_stale: bool
    """Whether the pipeline never drains and holds two weight versions."""
    zero: int
    """The ZeRO stage of the group."""


def schedule_slot(
    slot: StageSlot, microbatches: int, is_stale: bool, zero: int = 0, workers_after: int | None = None
) -> ScheduledSlot:
    """Returns a slot with its part of an update's microbatches under 1F1B.

    `workers_after` counts the workers after the slot if some of them are tensor-parallel groups.
    """
    size = len(slot.group)
    share = -(-microbatches // size)
    after = slot.after if workers_after is None else workers_after
    live = 1 if slot.is_alone else min(-(-after // size) + 1, share)
    return ScheduledSlot(slot, share, live, is_stale, zero)


class DeviceOrder:
    """Devices in pipeline order, from which stages take consecutive ones; knows the links between them."""

    def __init__(self, problem: PlanningProblem, order: tuple[str, ...], size: int = 0):
        self.machine, self.order = problem.machine, order
        self.devices = [self.machine.device(name) for name in order]
        self.devices_per_host = Counter(device.host for device in self.devices)
        groups = [order[i : i + size] for i in range(0, len(order), size)] if size else []
        self.ring_loads = _count(route for group in groups for route in _ring(self.machine, group))
        """Hops per wire when all groups of one `size` reduce at the same time; empty without a `size`."""
        self.transfer_loads = _count(self._transfers(groups or [(name,) for name in order]))
        """Transfers per wire between neighbouring stages, both directions counted."""
        self._slots: dict[tuple[int, int, int], StageSlot] = {}

    def slot(self, after: int, size: int, shards: int = 1) -> StageSlot:
        """Returns the slot of `size` workers of `shards` devices each that `after` devices follow."""
        if (after, size, shards) not in self._slots:
            self._slots[after, size, shards] = self._make(after, size, shards)
        return self._slots[after, size, shards]

    def has_slot(self, after: int, size: int, shards: int) -> bool:
        """Whether the devices suffice for such a slot and, if `shards` > 1, can form tensor-parallel groups."""
        end = len(self.order) - after
        starts = range(end - size * shards, end, shards)
        return starts[0] >= 0 and (shards == 1 or all(are_tp_group(self.devices[n : n + shards]) for n in starts))

    def _make(self, after: int, size: int, shards: int) -> StageSlot:
        end = len(self.order) - after
        start = end - size * shards
        group, devices = self.order[start:end:shards], self.devices[start:end]
        host, host_bytes = self._host(devices, shards)
        device_bytes = float(min(d.memory_bytes - d.reserved_bytes for d in devices))
        return StageSlot(
            group=group,
            kinds=tuple(dict.fromkeys(tp_kind(d.kind, shards) for d in devices)),
            after=after,
            is_alone=size * shards == len(self.order),
            ring=self._ring_link(group),
            next=self._next_link(group, end),
            host=host,
            memory=SlotMemory(device_bytes * shards, host_bytes * shards),
        )

    def _ring_link(self, group: tuple[str, ...]) -> SlotLink:
        routes = _ring(self.machine, group)
        if not routes:
            return FREE
        hops = _count(routes)
        load = max(hops.values(), default=1)
        contention = max((self.ring_loads[wire] / load for wire in hops), default=1.0) if self.ring_loads else 1.0
        byte_s = load / min(r.sum_bytes_per_s for r in routes)
        return SlotLink(max(r.sum_latency_s for r in routes), byte_s, contention)

    def _next_link(self, group: tuple[str, ...], end: int) -> SlotLink:
        # Replicas send at the same time, each to a different device if the next stage has as many.
        pairs = [(name, self.order[min(end + n, len(self.order) - 1)]) for n, name in enumerate(group)]
        routes = [self.machine.route(a, b) for a, b in pairs if a != b and end < len(self.order)]
        if not routes:
            return FREE
        transfers = _count(routes)
        contention = max((self.transfer_loads[wire] / count for wire, count in transfers.items()), default=1.0)
        rate = min(r.bytes_per_s for r in routes) / max(transfers.values(), default=1)
        return SlotLink(max(r.latency_s for r in routes), 1 / rate, max(contention, 1.0))

    def _transfers(self, groups: Sequence[tuple[str, ...]]) -> Iterator[Route]:
        """Yields the routes between neighbouring stages on different hosts, in both directions."""
        for one, two in pairwise(groups):
            for a, b in zip(one, two, strict=True):
                if self.machine.device(a).host != self.machine.device(b).host:
                    yield from (self.machine.route(a, b), self.machine.route(b, a))

    def _host(self, devices: list[Device], shards: int) -> tuple[SlotHost, float]:
        """Returns the host of a slot, and the least host memory per device; an empty one if a host has no CPU."""
        host, on_host = Counter(d.host for d in devices).most_common(1)[0]
        updaters, cpu_contention = on_host // shards, self.devices_per_host[host] / on_host
        links, limits, kind = [], [], ""
        for device in devices:
            cpu = cpu_of(self.machine, device.name)
            if cpu is None:
                return SlotHost(FREE, "", updaters, cpu_contention), 0.0
            kind = cpu.kind
            limits.append((cpu.memory_bytes - cpu.reserved_bytes) / self.devices_per_host[device.host])
            if device.type == "gpu":
                routes = self.machine.route(device.name, cpu.name), self.machine.route(cpu.name, device.name)
                links.append(SlotLink(max(r.latency_s for r in routes), 1 / min(r.bytes_per_s for r in routes)))
        slowest = max(links, key=lambda link: link.byte_s, default=FREE)
        return SlotHost(slowest, kind, updaters, cpu_contention), float(min(limits))


def _count(routes: Iterable[Route]) -> Counter[str]:
    """Returns how many routes pass each wire."""
    return Counter(wire for route in routes for wire in route.wires)


def cpu_of(machine: Machine, name: str) -> Device | None:
    """Returns the CPU of a device's host, or None if the host lists none."""
    try:
        return machine.cpu_of(machine.device(name))
    except InputError:
        return None


def _ring(machine: Machine, group: Sequence[str]) -> list[Route]:
    """Returns the routes around a ring of devices."""
    if len(group) < 2:
        return []
    return [machine.route(a, b) for a, b in zip(group, [*group[1:], group[0]], strict=True) if a != b]
