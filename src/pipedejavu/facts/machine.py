"""What is known of the hardware: hosts, the devices in them, and the links between devices.

A link is a rule for pairs of devices, so that a cluster of a thousand devices is a short file. The
first rule that matches a pair holds. Transfers whose links name the same wire split its bandwidth.
A figure that is not known is None, or zero where the simulator has an assumption of its own.
"""

from fnmatch import fnmatchcase
from functools import cached_property
from string import Formatter
from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from pipedejavu.facts.error import InputError, nearest, repeated
from pipedejavu.facts.measurement import Survey
from pipedejavu.facts.quantity import Bytes, BytesPerSecond, FlopPerSecond, Seconds
from pipedejavu.facts.record import Record


class Host(Record):
    """One computer: devices in it share its memory and its network interface."""

    name: str
    cores: int = Field(default=1, ge=1)
    processor: str = ""
    """The model of its CPU, as the manufacturer calls it."""
    sockets: int | None = Field(default=None, ge=1)
    numa_nodes: int | None = Field(default=None, ge=1)
    instruction_sets: tuple[str, ...] = ()
    """Those that matter for arithmetic, such as 'avx512f' and 'amx_bf16'."""
    disk_read_bytes_per_s: BytesPerSecond = 0.0
    disk_write_bytes_per_s: BytesPerSecond = 0.0


class Device(Record):
    """Something that computes and has a memory of its own; a host's CPU is one of its devices."""

    name: str
    kind: str
    """The model of the device, such as 'h200': the key of a profile's measured times."""
    type: Literal["cpu", "gpu"]
    host: str
    memory_bytes: Bytes
    reserved_bytes: Bytes = 0
    """Memory that is never ours: driver context, operating system."""
    flop_per_s: FlopPerSecond = 0.0
    memory_bytes_per_s: BytesPerSecond = 0.0
    efficiency: float | None = Field(default=None, gt=0, le=1)
    """Share of `flop_per_s` that the blocks of a transformer reach in training."""
    parameters_per_s: float = Field(default=0.0, ge=0)
    """How many parameters the optimizer (AdamW) updates in a second."""
    most_workers: int = Field(default=1, ge=1)
    """How many workers may divide it between them; of a CPU, its cores."""


class Link(Record):
    """How bytes move from the devices that match `source` to those that match `target`."""

    source: str = "*"
    target: str = "*"
    scope: Literal["any", "same-host", "other-host"] = "any"
    latency_s: Seconds = 0.0
    bytes_per_s: BytesPerSecond = Field(gt=0)
    wires: tuple[str, ...] = ("{source}>{target}",)
    """Names of what the bytes pass through; {source}, {target}, {source_host} and {target_host}
    are filled in. By default each pair of devices has a wire of its own in each direction."""
    sum_latency_s: Seconds | None = None
    """Of each round of a sum around a ring; that of a message where it was not measured."""
    sum_bytes_per_s: BytesPerSecond | None = Field(default=None, gt=0)
    """What a ring moves while it adds up, which takes more than moving; the link's rate where it was not measured."""


class Overlap(Record):
    """How much longer compute and copies of one device take while they run together."""

    compute: float = Field(default=1.0, ge=1)
    transfer: float = Field(default=1.0, ge=1)


class Route(NamedTuple):
    """The link between two given devices, with its wires named."""

    latency_s: float
    bytes_per_s: float
    wires: tuple[str, ...]
    sum_latency_s: float
    sum_bytes_per_s: float


class Machine(Record):
    """Hosts, devices and links; one computer or a cluster, at hand or not."""

    name: str
    hosts: tuple[Host, ...] = Field(min_length=1)
    devices: tuple[Device, ...] = Field(min_length=1)
    links: tuple[Link, ...] = ()
    overlap: Overlap = Overlap()
    survey: Survey | None = None
    """How the figures were measured, where they were."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.agreed()

    def disagreements(self) -> list[str]:
        """Returns names given twice, hosts and devices that are missing, and wires that cannot be named."""
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

    def cpu_of(self, device: Device) -> Device:
        """Returns the CPU of the host that `device` is in: where offloaded state rests."""
        if device.host in self._cpus:
            return self._cpus[device.host]
        raise InputError(
            f"host '{device.host}' lists no device of type 'cpu', but the plan keeps state in its memory;"
            " add one with the host's memory_bytes"
        )

    def divided(self, num_workers: int, *, by_kind: bool = False) -> Self:
        """Returns the machine with its CPUs divided, all alike, into parts enough for `num_workers`.

        A part has the name of its CPU and a number, and its share of memory and rates; with `by_kind` it also has a
        kind of its own, under which profiles have its times. Without CPUs that may be divided, or where there are
        devices enough, this is the machine as it is.
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
        """Returns how bytes go from one device to another; raises InputError where no link matches."""
        found = self._routes.get((source, target))
        if found is None:
            found = self._routes[source, target] = self._find_route(self.device(source), self.device(target))
        return found

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
                return Route(
                    link.latency_s, link.bytes_per_s, wires, sum_latency_s, link.sum_bytes_per_s or link.bytes_per_s
                )
        raise InputError(
            f"machine '{self.name}' has no link from '{source.name}' to '{target.name}'; add one to its links"
        )


def part_kind(kind: str, count: int) -> str:
    """Names the kind of one of `count` equal parts of a CPU."""
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
