"""Places and seats: where a stage may be, and what connects it to its replicas, to the next stage and to its host."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from pipedejavu.facts import Device, InputError, Machine, Route
from pipedejavu.program.tp_group import are_tp_group, tp_kind
from pipedejavu.search.candidate_plan import Array, PlanningProblem


class SlotLink(NamedTuple):
    """What a transfer takes: latency, and seconds for each byte."""

    latency_s: float
    byte_s: float

    def time(self, size_bytes: Array) -> Array:
        """Returns the time of messages; none where there is nothing to send."""
        return np.where(size_bytes > 0, self.latency_s + size_bytes * self.byte_s, 0.0)

    def turn(self, size: int, size_bytes: Array, messages: Array) -> Array:
        """Returns what values of `size` devices take to go around a ring, added up or gathered."""
        return np.asarray((size - 1) * (messages * self.latency_s + size_bytes / size * self.byte_s))


FREE = SlotLink(0.0, 0.0)


class StageSlot(NamedTuple):
    """A group of devices in a row, whatever a stage there would hold."""

    group: tuple[str, ...]
    """Devices that would each hold the stage; of a team the first."""
    kinds: tuple[str, ...]
    """Of these devices, or teams, each once."""
    after: int
    """Devices behind it."""
    is_alone: bool
    """Whether there are no others, so that reductions hide behind the backward pass."""
    ring: SlotLink
    """Around which the group adds its gradients up, alone."""
    crowd: float
    """How many rings of other groups, and itself, are on its fullest wire."""
    next: SlotLink
    """To the next stage."""
    meets: float
    """Transfers of other stages on its wires, as a part of its own."""
    host: SlotLink
    """Between a device and its host, either way."""
    cpu: str
    """The kind of the host's CPU; empty where the host has none."""
    updaters: int
    """Workers of the group that one CPU may update for at the same time."""
    cpu_crowd: float
    """How many times as many devices of the row are on that CPU's host."""
    room_bytes: float
    host_room_bytes: float
    """Of the host's memory, this device's or team's part."""

    def likeness(self) -> tuple[object, ...]:
        """Returns what makes stages here cost what they cost, beside the devices behind."""
        return (len(self.group), *self[1:2], *self[3:])


class ScheduledSlot(NamedTuple):
    """A place in a pipeline that runs."""

    place: StageSlot
    share: int
    """Of an update's microbatches, for each device."""
    live: int
    """Microbatches of a device between their forward and their backward."""
    is_stale: bool
    """Whether the pipeline goes on without draining, with two weight versions."""
    zero: int
    """How far the group divides its state."""


def slot_of(
    place: StageSlot, microbatches: int, is_stale: bool, zero: int = 0, behind: int | None = None
) -> ScheduledSlot:
    """Returns a place with its part of an update's microbatches, under 1F1B.

    `behind` are the workers behind it, where some of them are teams of several devices.
    """
    size = len(place.group)
    share = microbatches // size
    live = 1 if place.is_alone else min(-(-(place.after if behind is None else behind) // size) + 1, share)
    return ScheduledSlot(place, share, live, is_stale, zero)


class DeviceOrder:
    """Devices in a row, of which stages take the next ones, the last stage the last; knows what connects them."""

    def __init__(self, problem: PlanningProblem, order: tuple[str, ...], size: int = 0):
        self.machine, self.order = problem.machine, order
        self.devices = [self.machine.device(name) for name in order]
        self.sharers = Counter(device.host for device in self.devices)
        self.is_on_cpu = all(device.type == "cpu" for device in self.devices)
        groups = [order[i : i + size] for i in range(0, len(order), size)] if size else []
        self.loads = _count(route for group in groups for route in _ring(self.machine, group))
        """Of wires, where all groups have one `size`: their reductions go on at the same time."""
        self.flows = _count(self._flows(groups or [(name,) for name in order]))
        """Of wires: all transfers between neighbours, both ways."""
        self._places: dict[tuple[int, int, int], StageSlot] = {}

    def place(self, after: int, size: int, shards: int = 1) -> StageSlot:
        """Returns the place of `size` devices, or teams of `shards`, with `after` devices behind it."""
        if (after, size, shards) not in self._places:
            self._places[after, size, shards] = self._make(after, size, shards)
        return self._places[after, size, shards]

    def has_teams(self, after: int, size: int, shards: int) -> bool:
        """Whether there is such a place, with devices that can be teams."""
        end = len(self.order) - after
        starts = range(end - size * shards, end, shards)
        return starts[0] >= 0 and (shards == 1 or all(are_tp_group(self.devices[n : n + shards]) for n in starts))

    def _make(self, after: int, size: int, shards: int) -> StageSlot:
        end = len(self.order) - after
        start = end - size * shards
        group, devices = self.order[start:end:shards], self.devices[start:end]
        host, cpu, host_room = self._host(devices)
        name, members = Counter(d.host for d in devices).most_common(1)[0]
        return StageSlot(
            group=group,
            kinds=tuple(dict.fromkeys(tp_kind(d.kind, shards) for d in devices)),
            after=after,
            is_alone=size * shards == len(self.order),
            **self._ring(group),
            **self._next(group, end),
            host=host,
            cpu=cpu,
            updaters=members // shards,
            cpu_crowd=self.sharers[name] / members,
            room_bytes=float(min(d.memory_bytes - d.reserved_bytes for d in devices)) * shards,
            host_room_bytes=host_room * shards,
        )

    def _ring(self, group: tuple[str, ...]) -> dict[str, Any]:
        routes = _ring(self.machine, group)
        if not routes:
            return {"ring": FREE, "crowd": 1.0}
        own = _count(routes)
        load = max(own.values(), default=1)
        crowd = max((self.loads[wire] / load for wire in own), default=1.0) if self.loads else 1.0
        link = SlotLink(max(r.sum_latency_s for r in routes), load / min(r.sum_bytes_per_s for r in routes))
        return {"ring": link, "crowd": crowd}

    def _next(self, group: tuple[str, ...], end: int) -> dict[str, Any]:
        # Replicas send at the same time, each to a device of its own where there are as many.
        pairs = [(name, self.order[min(end + n, len(self.order) - 1)]) for n, name in enumerate(group)]
        routes = [self.machine.route(a, b) for a, b in pairs if a != b and end < len(self.order)]
        if not routes:
            return {"next": FREE, "meets": 0.0}
        own = _count(routes)
        meets = max((self.flows[wire] / count - 1 for wire, count in own.items()), default=0.0)
        rate = min(r.bytes_per_s for r in routes) / max(own.values(), default=1)
        return {"next": SlotLink(max(r.latency_s for r in routes), 1 / rate), "meets": max(meets, 0.0)}

    def _flows(self, groups: Sequence[tuple[str, ...]]) -> Iterator[Route]:
        """Yields the routes between neighbours in different hosts, there and back."""
        for one, two in pairwise(groups):
            for a, b in zip(one, two, strict=True):
                if self.machine.device(a).host != self.machine.device(b).host:
                    yield from (self.machine.route(a, b), self.machine.route(b, a))

    def _host(self, devices: list[Device]) -> tuple[SlotLink, str, float]:
        """Returns the slowest way between a device of a group and its host, the kind of CPU there, and its room."""
        links, rooms, kind = [], [], ""
        for device in devices:
            cpu = cpu_of(self.machine, device.name)
            if cpu is None:
                return FREE, "", 0.0
            kind = cpu.kind
            rooms.append((cpu.memory_bytes - cpu.reserved_bytes) / self.sharers[device.host])
            if device.type == "gpu":
                ways = self.machine.route(device.name, cpu.name), self.machine.route(cpu.name, device.name)
                links.append(SlotLink(max(w.latency_s for w in ways), 1 / min(w.bytes_per_s for w in ways)))
        return max(links, key=lambda found: found.byte_s, default=FREE), kind, float(min(rooms))


def _count(routes: Iterable[Route]) -> Counter[str]:
    """Returns how many routes pass each wire."""
    return Counter(wire for route in routes for wire in route.wires)


def cpu_of(machine: Machine, name: str) -> Device | None:
    """Returns the CPU of a device's host, or None where the host lists none."""
    try:
        return machine.cpu_of(machine.device(name))
    except InputError:
        return None


def _ring(machine: Machine, group: Sequence[str]) -> list[Route]:
    """Returns the routes around a ring of devices."""
    if len(group) < 2:
        return []
    return [machine.route(a, b) for a, b in zip(group, [*group[1:], group[0]], strict=True) if a != b]
