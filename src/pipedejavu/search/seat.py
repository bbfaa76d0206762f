"""Seats: where a stage may be, and what connects it to its replicas, to the next stage and to its host."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipedejavu.facts import Device, InputError, Machine, Route
from pipedejavu.search.draft import Array, Mode, Scene


class Link(NamedTuple):
    """What a transfer takes: latency, and seconds for each byte."""

    latency_s: float
    byte_s: float

    def time(self, size_bytes: Array) -> Array:
        """Returns the time of messages; none where there is nothing to send."""
        return np.where(size_bytes > 0, self.latency_s + size_bytes * self.byte_s, 0.0)


FREE = Link(0.0, 0.0)


@dataclass(frozen=True)
class Seat:
    """A place for one stage of an update."""

    group: tuple[str, ...]
    """Devices that each hold the stage."""
    kinds: tuple[str, ...]
    """Of these devices, each once."""
    share: int
    """Of an update's microbatches, for each device."""
    live: int
    """Microbatches of a device between their forward and their backward."""
    is_alone: bool
    """Whether there is no other stage, so that reductions hide behind the backward pass."""
    is_stale: bool
    """Whether the pipeline goes on without draining, with two weight versions."""
    ring: Link
    next: Link
    host: Link
    """Between a device and its host, either way."""
    cpu: str
    """The kind of the host's CPU; empty where the host has none."""
    room_bytes: float
    host_room_bytes: float
    """Of the host's memory, this device's part."""


class Seats:
    """All seats along one order of devices: a stage takes the next devices, the last stage the last ones."""

    def __init__(
        self, scene: Scene, order: tuple[str, ...], microbatches: int, is_stale: bool, sizes: Sequence[int] = ()
    ):
        self.scene, self.machine, self.order = scene, scene.machine, order
        self.microbatches, self.is_stale = microbatches, is_stale
        self.loads: Counter[str] = Counter()
        """Of wires, where all groups are known: their reductions go on at the same time."""
        if len(set(sizes)) == 1:
            size = sizes[0]
            groups = [order[i : i + size] for i in range(0, len(order), size)]
            self.loads = Counter(w for group in groups for r in _ring(self.machine, group) for w in r.wires)
        self.sharers = Counter(self.machine.device(name).host for name in order)
        self._known: dict[tuple[int, int], Seat] = {}

    def seat(self, after: int, size: int) -> Seat:
        """Returns the seat of `size` devices with `after` devices behind it."""
        if (after, size) not in self._known:
            self._known[after, size] = self._make(after, size)
        return self._known[after, size]

    def _make(self, after: int, size: int) -> Seat:
        end = len(self.order) - after
        group = self.order[end - size : end]
        devices = [self.machine.device(name) for name in group]
        share = self.microbatches // size
        is_alone = size == len(self.order)
        rooms = [d.memory_bytes - d.reserved_bytes for d in devices]
        host, cpu, host_room = self._host(group)
        return Seat(
            group=group,
            kinds=tuple(dict.fromkeys(d.kind for d in devices)),
            share=share,
            live=1 if is_alone else min(-(-after // size) + 1, share),
            is_alone=is_alone,
            is_stale=self.is_stale,
            ring=self._ring(group),
            next=self._next(group, end),
            host=host,
            cpu=cpu,
            room_bytes=float(min(rooms)),
            host_room_bytes=host_room,
        )

    def _ring(self, group: tuple[str, ...]) -> Link:
        routes = _ring(self.machine, group)
        if not routes:
            return FREE
        loads = self.loads or Counter(wire for route in routes for wire in route.wires)
        load = max((loads[wire] for route in routes for wire in route.wires), default=1)
        return Link(max(r.latency_s for r in routes), load / min(r.bytes_per_s for r in routes))

    def _next(self, group: tuple[str, ...], end: int) -> Link:
        if end == len(self.order):
            return FREE
        # Replicas send at the same time, each to a device of its own where there are as many.
        pairs = [(name, self.order[min(end + n, len(self.order) - 1)]) for n, name in enumerate(group)]
        routes = [self.machine.route(a, b) for a, b in pairs if a != b]
        users = Counter(wire for route in routes for wire in route.wires)
        load = max(users.values(), default=1)
        return Link(max(r.latency_s for r in routes), load / min(r.bytes_per_s for r in routes)) if routes else FREE

    def _host(self, group: tuple[str, ...]) -> tuple[Link, str, float]:
        """Returns the slowest way between a device of a group and its host, the kind of CPU there, and its room."""
        links, rooms, kind = [], [], ""
        for name in group:
            device = self.machine.device(name)
            cpu = cpu_of(self.machine, name)
            if cpu is None:
                return FREE, "", 0.0
            kind = cpu.kind
            rooms.append((cpu.memory_bytes - cpu.reserved_bytes) / self.sharers[device.host])
            if device.type == "gpu":
                ways = self.machine.route(name, cpu.name), self.machine.route(cpu.name, name)
                links.append(Link(max(w.latency_s for w in ways), 1 / min(w.bytes_per_s for w in ways)))
        link = max(links, key=lambda found: found.byte_s, default=FREE)
        return link, kind, float(min(rooms))

    def allows(self, seat: Seat, mode: Mode) -> bool:
        """Whether the mode makes sense there: a host to rest on, replicas to divide state over."""
        on_cpu = all(self.machine.device(name).type == "cpu" for name in seat.group)
        return not mode.uses_host or (bool(seat.cpu) and not on_cpu)


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
