"""The hardware: hosts, the devices in them, and the links between devices.

A link is a rule for pairs of devices, so that a cluster of a thousand devices is a short file; the first rule that
matches a pair applies. Transfers over links with the same wire share its bandwidth. An unknown figure is None, or zero
if the simulator has a default for it.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from math import log2
from string import Formatter
from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from pipedejavu.facts.error import InputError, nearest, repeated
from pipedejavu.facts.measurement import Survey
from pipedejavu.facts.quantity import Bytes, BytesPerSecond, FlopPerSecond, Seconds
from pipedejavu.facts.record import Record

MANY_CORES = 4
"""A worker with at least this many cores leaves one to the threads that send messages."""


class Host(Record):
    """One computer; its devices share its memory and its network interface."""

    name: str
    cores: int = Field(default=1, ge=1)
    processor: str = ""
    """Model of its CPU, as the manufacturer calls it."""
    sockets: int | None = Field(default=None, ge=1)
    numa_nodes: int | None = Field(default=None, ge=1)
    instruction_sets: tuple[str, ...] = ()
    """Those relevant to arithmetic, such as 'avx512f' and 'amx_bf16'."""
    disk_read_bytes_per_s: BytesPerSecond = 0.0
    disk_write_bytes_per_s: BytesPerSecond = 0.0


class Device(Record):
    """Something that computes and has its own memory; a host's CPU is one of its devices."""

    name: str
    kind: str
    """Model of the device, such as 'h200': the key of a profile's measured times."""
    type: Literal["cpu", "gpu"]
    host: str
    memory_bytes: Bytes
    reserved_bytes: Bytes = 0
    """Memory that is never available: driver context, operating system."""
    flop_per_s: FlopPerSecond = 0.0
    memory_bytes_per_s: BytesPerSecond = 0.0
    efficiency: float | None = Field(default=None, gt=0, le=1)
    """Share of `flop_per_s` that transformer blocks reach in training."""
    parameters_per_s: float = Field(default=0.0, ge=0)
    """Parameters that the optimizer (AdamW) updates per second."""
    most_workers: int = Field(default=1, ge=1)
    """Most workers that may share the device; for a CPU, its number of cores."""


CollectiveKind = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all"]
TRAFFIC = {
    "all-reduce": lambda n: (2.0 * (n - 1), 2.0 * (n - 1) / n),
    "reduce-scatter": lambda n: (n - 1.0, (n - 1) / n),
    "all-gather": lambda n: (n - 1.0, (n - 1) / n),
    "all-to-all": lambda n: (n - 1.0, (n - 1) / n),
}
"""Rounds and traffic of ring algorithms over n members; the traffic is a multiple of the value's bytes."""


class CollectiveTime(Record):
    """Measured time of a collective, as a line in the bytes of the whole value, once all members have arrived."""

    kind: CollectiveKind
    members: int = Field(ge=2)
    latency_s: Seconds = 0.0
    bytes_per_s: BytesPerSecond = Field(gt=0)
    core_share: float = Field(default=0.0, ge=0, le=1)
    """Share of that time for which each member's host copies and adds, instead of waiting for messages."""

    def among(self, members: int) -> "CollectiveTime":
        """Returns the time for another number of members, in proportion to a ring's rounds and traffic."""
        (rounds, traffic), (known_rounds, known_traffic) = (TRAFFIC[self.kind](n) for n in (members, self.members))
        return self.replace(
            members=members,
            latency_s=self.latency_s * rounds / known_rounds,
            bytes_per_s=self.bytes_per_s * known_traffic / traffic,
        )


class Link(Record):
    """How bytes move from devices that match `source` to devices that match `target`."""

    source: str = "*"
    target: str = "*"
    scope: Literal["any", "same-host", "other-host"] = "any"
    latency_s: Seconds = 0.0
    bytes_per_s: BytesPerSecond = Field(gt=0)
    wires: tuple[str, ...] = ("{source}>{target}",)
    """Names of what the bytes pass through; {source}, {target}, {source_host} and {target_host} are filled in. By
    default each pair of devices has its own wire in each direction."""
    sum_latency_s: Seconds | None = None
    """Latency of each round of a ring all-reduce; the link's latency if not measured."""
    sum_bytes_per_s: BytesPerSecond | None = Field(default=None, gt=0)
    """Rate of a ring all-reduce, which adds as well as moves; the link's rate if not measured."""
    sum_start_s: Seconds = 0.0
    """Time for two devices to start an all-reduce: its launch, and the wait for the later one; for n it is log₂ n times
    as long."""
    collectives: tuple[CollectiveTime, ...] = ()
    """Collectives over this link as they were measured; those of kinds that are missing are computed as rings."""


class Overlap(Record):
    """Slowdown of compute and of copies on one device while both run."""

    compute: float = Field(default=1.0, ge=1)
    transfer: float = Field(default=1.0, ge=1)


class Route(NamedTuple):
    """The link between two particular devices, with its wires named."""

    latency_s: float
    bytes_per_s: float
    wires: tuple[str, ...]
    sum_latency_s: float
    sum_bytes_per_s: float
    sum_start_s: float = 0.0
    collectives: tuple[CollectiveTime, ...] = ()

    def collective(self, kind: str, members: int) -> CollectiveTime | None:
        """Returns the measured time of a collective, by the nearest number of members; None if there is none."""
        known = [time for time in self.collectives if time.kind == kind]
        return min(known, key=lambda time: abs(time.members - members)).among(members) if known else None

    def collective_line(self, kind: str, members: int) -> tuple[float, float]:
        """Returns the latency of a collective, and its time per byte: as measured, or else those of a ring."""
        if (known := self.collective(kind, members)) is not None:
            return known.latency_s, 1 / known.bytes_per_s
        rounds, traffic = TRAFFIC[kind](members)
        return rounds * self.sum_latency_s + log2(members) * self.sum_start_s, traffic / self.sum_bytes_per_s


class Machine(Record):
    """Hosts, devices and links: one computer or a cluster, at hand or not."""

    name: str
    hosts: tuple[Host, ...] = Field(min_length=1)
    devices: tuple[Device, ...] = Field(min_length=1)
    links: tuple[Link, ...] = ()
    overlap: Overlap = Overlap()
    survey: Survey | None = None
    """How the figures were measured; None if they were not."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.agreed()

    def disagreements(self) -> list[str]:
        """Returns duplicate names, missing hosts and devices, and invalid wire names."""
        hosts = {h.name: h for h in self.hosts}
        names = [d.name for d in self.devices]
        faults = [f"two hosts are called '{n}'" for n in repeated(h.name for h in self.hosts)]
        faults += [f"two devices are called '{n}'" for n in repeated(names)]
        faults += [
            f"device '{d.name}' is on host '{d.host}', which is missing{nearest(d.host, hosts)}"
            for d in self.devices
            if d.host not in hosts
        ]
        for index, link in enumerate(self.links):
            faults += [f"links[{index}].wires: {fault}" for fault in _wire_faults(link)]
            for end, pattern in (("source", link.source), ("target", link.target)):
                if not any(fnmatchcase(n, pattern) for n in names):
                    faults.append(f"links[{index}].{end} '{pattern}' matches no device{nearest(pattern, names)}")
        return faults

    @cached_property
    def _by_name(self) -> dict[str, Device]:
        return {d.name: d for d in self.devices}

    @cached_property
    def _cpus(self) -> dict[str, Device]:
        """The first CPU of each host."""
        return {d.host: d for d in reversed(self.devices) if d.type == "cpu"}

    @cached_property
    def _routes(self) -> dict[tuple[str, str], Route]:
        return {}

    def device(self, name: str) -> Device:
        """Returns the device called `name`; raises InputError with the nearest name."""
        if name not in self._by_name:
            raise InputError(f"machine '{self.name}' has no device '{name}'{nearest(name, self._by_name)}")
        return self._by_name[name]

    def leaves_core(self, device: Device, names: Sequence[str]) -> bool:
        """Whether a worker on a device, beside workers on the others of `names`, leaves a core to its messages."""
        beside = sum(self.device(name).host == device.host for name in names)
        cores = next(host.cores for host in self.hosts if host.name == device.host)
        return device.type == "gpu" or cores // beside >= MANY_CORES

    def cpu_of(self, device: Device) -> Device:
        """Returns the CPU of `device`'s host, whose memory holds offloaded state."""
        if device.host in self._cpus:
            return self._cpus[device.host]
        raise InputError(
            f"host '{device.host}' lists no device of type 'cpu', but the plan keeps state in its memory;"
            " add one with the host's memory_bytes"
        )

    def divided(self, num_workers: int, *, by_kind: bool = False) -> Self:
        """Returns the machine with each CPU divided into equal parts, as few as give `num_workers` devices.

        A part has its CPU's name with a number, and its share of memory and rates; with `by_kind` it also has its own
        kind, under which profiles hold its times. Returns the machine unchanged if it has enough devices, or no CPU
        that may be divided.
        """
        most = max(d.most_workers for d in self.devices)
        counts = (parts for parts in range(1, most + 1) if self._num_parts(parts) >= num_workers)
        parts = next(counts, most)
        if parts == 1:
            return self
        devices = [part for d in self.devices for part in _parts_of(d, min(parts, d.most_workers), by_kind)]
        return self.replace(devices=tuple(devices))

    def _num_parts(self, parts: int) -> int:
        return sum(min(parts, d.most_workers) for d in self.devices)

    def route(self, source: str, target: str) -> Route:
        """Returns the route from one device to another; raises InputError if no link matches."""
        route = self._routes.get((source, target))
        if route is None:
            route = self._routes[source, target] = self._find_route(self.device(source), self.device(target))
        return route

    def _find_route(self, source: Device, target: Device) -> Route:
        scope = "same-host" if source.host == target.host else "other-host"
        for link in self.links:
            if (
                link.scope in ("any", scope)
                and fnmatchcase(source.name, link.source)
                and fnmatchcase(target.name, link.target)
            ):
                ends = {"source": source.name, "target": target.name}
                ends |= {"source_host": source.host, "target_host": target.host}
                wires = tuple(w.format_map(ends) for w in link.wires)
                sum_latency_s = link.latency_s if link.sum_latency_s is None else link.sum_latency_s
                sum_rate = link.sum_bytes_per_s or link.bytes_per_s
                sums = (sum_latency_s, sum_rate, link.sum_start_s)
                return Route(link.latency_s, link.bytes_per_s, wires, *sums, link.collectives)
        raise InputError(
            f"machine '{self.name}' has no link from '{source.name}' to '{target.name}'; add one to its links"
        )


def part_kind(kind: str, count: int) -> str:
    """Returns the kind of one of `count` equal parts of a CPU."""
    return f"{kind}/{count}" if count > 1 else kind


def _parts_of(device: Device, count: int, by_kind: bool) -> list[Device]:
    if count == 1:
        return [device]
    part = device.replace(
        kind=part_kind(device.kind, count) if by_kind else device.kind,
        memory_bytes=device.memory_bytes // count,
        reserved_bytes=device.reserved_bytes // count,
        flop_per_s=device.flop_per_s / count,
        memory_bytes_per_s=device.memory_bytes_per_s / count,
        parameters_per_s=device.parameters_per_s / count,
        most_workers=max(1, device.most_workers // count),
    )
    return [part.replace(name=f"{device.name}.{n}") for n in range(count)]


_ENDS = ("source", "target", "source_host", "target_host")


def _wire_faults(link: Link) -> list[str]:
    return [f"'{w}' may hold only {{{'}, {'.join(_ENDS)}}}" for w in link.wires if not _is_wire(w)]


def _is_wire(wire: str) -> bool:
    try:
        parts = list(Formatter().parse(wire))
    except ValueError:
        return False
    return all(name is None or (name in _ENDS and not spec and not how) for _, name, spec, how in parts)
