"""Clusters: groups of equal hosts with known GPUs and CPUs, and a network between them.

A cluster is a short JSON file or one line, '8x(8xa100-80gb + 2xepyc-7763 + 1TiB), 100Gb/s'; `compose` turns it into a
machine. Within a host, GPUs of one kind use NVLink if they have it; all other transfers use PCIe, which they share with
copies to and from the host. All traffic between hosts shares each host's network interface.
"""

import json
import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import Field, model_validator

from pipedejavu.facts.catalog import KnownDevice, known_device
from pipedejavu.facts.error import InputError
from pipedejavu.facts.file import read_file
from pipedejavu.facts.machine import Device, Host, Link, Machine
from pipedejavu.facts.quantity import Bytes, BytesPerSecond, Seconds
from pipedejavu.facts.record import Record

LINK_EFFICIENCY = 0.8
"""Share of the stated rate of PCIe, NVLink or a network that transfers are assumed to reach."""
MEMORY_BYTES_PER_CORE = 8 << 30
"""Memory per core of a host whose memory is not given."""
CONTEXT_BYTES, HIDDEN_SHARE = 1 << 29, 0.02
"""GPU memory that a context takes, and the share that the driver reserves."""
SYSTEM_SHARE = 0.05
"""Share of a host's memory that its operating system takes."""
PEER_LATENCY_S, PCIE_LATENCY_S, PROCESS_LATENCY_S = 5e-6, 10e-6, 20e-6
PEER_SUM_SHARE, PEER_SUM_LATENCY_S = 0.73, 3.2e-6
"""Share of NVLink's rate that all-reduces reach, and the latency of each of their rounds: published measurements on
2 to 8 A100."""
SUM_START_S = 8.65e-5
"""Time for two GPUs to start an all-reduce, fitted to published training runs by `bench/published.py`."""
PROCESS_BYTES_PER_S = 5e9
"""Rate between two workers on one CPU."""
MOST_DEVICES = 65_536

_COUNTED = re.compile(r"(?:(\d{1,9})\s*[x×*]\s*)?(.+)", re.IGNORECASE | re.DOTALL)


class HostGroup(Record):
    """Hosts with equal devices."""

    count: int = Field(default=1, ge=1)
    gpus: tuple[str, ...] = ()
    """Each as '8 x a100-80gb', or just the name for a single GPU."""
    cpu: str = ""
    """Such as '2 x epyc-7763' for two sockets; without a CPU no state can be offloaded to the host."""
    memory_bytes: Bytes = 0
    """Memory of each host; by default 8 GiB per core."""


class Cluster(Record):
    """Groups of hosts, and the network between them."""

    name: str = ""
    hosts: tuple[HostGroup, ...] = Field(min_length=1)
    network_bytes_per_s: BytesPerSecond = 0.0
    """Rate of each host's network interface, in one direction."""
    network_latency_s: Seconds = 20e-6

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.agreed()

    def disagreements(self) -> list[str]:
        """Returns unknown devices, hosts without devices, and several hosts without a network."""
        faults = []
        for index, group in enumerate(self.hosts):
            asked = [(text, "gpu") for text in group.gpus] + [(group.cpu, "cpu")] * bool(group.cpu)
            if not asked:
                faults.append(f"hosts[{index}] has neither GPUs nor a CPU; name one, such as 'epyc-7763'")
            for text, type_ in asked:
                try:
                    _read_counted(text, type_)
                except InputError as fault:
                    faults.append(f"hosts[{index}]: {fault}")
        count = sum(group.count for group in self.hosts)
        if count > 1 and not self.network_bytes_per_s:
            faults.append(f"{count} hosts have no network between them; give its rate, such as '100 Gb/s'")
        return faults


class _CountedDevice(NamedTuple):
    number: int
    device: KnownDevice


def read_machine(text: str) -> Machine:
    """Returns the machine described by a machine file, a cluster file, or a cluster in one line."""
    if not text.endswith(".json") and not _is_file(text):
        return compose(parse_cluster(text))
    content = read_file(text)
    try:
        plain = json.loads(content)
    except (ValueError, RecursionError):
        plain = None
    if isinstance(plain, dict) and "devices" not in plain and _is_cluster(plain):
        return compose(Cluster.from_json(content, source=text))
    return Machine.from_json(content, source=text)


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # the text is too long for a file name
        return False


def _is_cluster(plain: dict[str, object]) -> bool:
    hosts = plain.get("hosts")
    groups = [host for host in hosts if isinstance(host, dict)] if isinstance(hosts, list) else []
    return "network_bytes_per_s" in plain or any({"gpus", "cpu", "count"} & host.keys() for host in groups)


def parse_cluster(text: str) -> Cluster:
    """Parses one line: hosts and network separated by commas, a host's devices and memory separated by '+'."""
    hosts, network = [], {}
    for part in re.split(r",(?![^()]*\))", text):
        part = part.strip()
        if re.fullmatch(r"[\d.]+\s*\S*(/s|bps)", part):
            network["network_bytes_per_s"] = part
        elif re.fullmatch(r"[\d.]+\s*[nuµm]?s", part):
            network["network_latency_s"] = part
        else:
            hosts.append(_parse_host(part, text))
    return _checked({"name": text, "hosts": hosts, **network})


def _parse_host(text: str, whole: str) -> dict[str, object]:
    counted = re.fullmatch(r"(?:(\d{1,9})\s*[x×*]\s*)?\(([^()]*)\)", text, re.IGNORECASE)
    count, inside = (int(counted[1] or 1), counted[2]) if counted else (1, text)
    gpus: list[str] = []
    form: dict[str, object] = {"count": count}
    for item in (part.strip() for part in inside.split("+")):
        if not item or "(" in item or ")" in item:
            raise InputError(
                f"machine '{whole}' is neither a file nor hosts of known devices;"
                " write it as '8x(8xa100-80gb + 2xepyc-7763), 100Gb/s'"
            )
        if re.fullmatch(r"[\d.]+\s*[KMGTP]i?B", item):
            form["memory_bytes"] = item
        elif _read_counted(item).device.type == "gpu":
            gpus.append(item)
        elif "cpu" in form:
            raise InputError(f"host '{text}' names two CPUs, '{form['cpu']}' and '{item}'; write sockets as '2x{item}'")
        else:
            form["cpu"] = item
    return {**form, "gpus": tuple(gpus)}


def _checked(form: dict[str, object]) -> Cluster:
    return Cluster.from_json(json.dumps(form), source=f"machine '{form['name']}'")


def _read_counted(text: str, type_: str | None = None) -> _CountedDevice:
    match = _COUNTED.fullmatch(text.strip())
    count, name = (int(match[1] or 1), match[2]) if match else (1, text)
    if count < 1:
        raise InputError(f"'{text}' has no device; give at least 1")
    return _CountedDevice(count, known_device(name, type_))  # type: ignore[arg-type]


def compose(cluster: Cluster) -> Machine:
    """Returns the machine that a cluster describes."""
    groups = [(group, [_read_counted(text, "gpu") for text in group.gpus]) for group in cluster.hosts]
    num_devices = sum(group.count * (1 + sum(part.number for part in gpus)) for group, gpus in groups)
    if num_devices > MOST_DEVICES:
        raise InputError(f"the machine would have {num_devices:,} devices; compose at most {MOST_DEVICES:,}")
    hosts: list[Host] = []
    devices: list[Device] = []
    is_alone = sum(group.count for group in cluster.hosts) == 1
    for group, gpus in groups:
        cpu = _read_counted(group.cpu, "cpu") if group.cpu else None
        for _ in range(group.count):
            name = "host" if is_alone else f"h{len(hosts)}"
            prefix = "" if is_alone else f"{name}/"
            hosts.append(_host(name, cpu))
            devices += [_gpu(f"{prefix}{d.name}-{n}", name, d) for n, d in _numbered(gpus)]
            devices += [_cpu(f"{prefix}cpu", name, cpu, group.memory_bytes)] if cpu else []
    links = _links(groups, "" if is_alone else "*/")
    if not is_alone:
        links.append(
            Link(
                scope="other-host",
                latency_s=cluster.network_latency_s,
                bytes_per_s=LINK_EFFICIENCY * cluster.network_bytes_per_s,
                wires=("nic-out:{source_host}", "nic-in:{target_host}"),
            )
        )
    return Machine(name=cluster.name or "cluster", hosts=tuple(hosts), devices=tuple(devices), links=tuple(links))


def _numbered(parts: list[_CountedDevice]) -> list[tuple[int, KnownDevice]]:
    """Returns a host's GPUs, numbered from 0 within each kind."""
    counts: dict[str, int] = {}
    rows = []
    for part in parts:
        for _ in range(part.number):
            rows.append((counts.setdefault(part.device.name, 0), part.device))
            counts[part.device.name] += 1
    return rows


def _host(name: str, cpu: _CountedDevice | None) -> Host:
    if cpu is None:
        return Host(name=name)
    return Host(name=name, cores=cpu.number * cpu.device.units, processor=cpu.device.title, sockets=cpu.number)


def _gpu(name: str, host: str, known: KnownDevice) -> Device:
    return Device(
        name=name,
        kind=known.name,
        type="gpu",
        host=host,
        memory_bytes=known.memory_bytes,
        reserved_bytes=CONTEXT_BYTES + round(HIDDEN_SHARE * known.memory_bytes),
        flop_per_s=known.flop_per_s,
        memory_bytes_per_s=known.memory_bytes_per_s,
        efficiency=known.efficiency,
    )


def _cpu(name: str, host: str, cpu: _CountedDevice, memory_bytes: int) -> Device:
    count, known = cpu
    cores = count * known.units
    size = memory_bytes or cores * MEMORY_BYTES_PER_CORE
    return Device(
        name=name,
        kind=known.name if count == 1 else f"{count}x{known.name}",
        type="cpu",
        host=host,
        memory_bytes=size,
        reserved_bytes=round(SYSTEM_SHARE * size),
        flop_per_s=count * known.flop_per_s,
        memory_bytes_per_s=count * known.memory_bytes_per_s,
        efficiency=known.efficiency,
        most_workers=cores,
    )


def _links(groups: list[tuple[HostGroup, list[_CountedDevice]]], prefix: str) -> list[Link]:
    """Returns the links within hosts; a kind of GPU in several groups gets the slowest PCIe rate of its hosts."""
    pcie: dict[str, float] = {}
    peers: dict[str, float] = {}
    for group, gpus in groups:
        limit = [_read_counted(group.cpu, "cpu").device.pcie_bytes_per_s] if group.cpu else []
        for _, known in gpus:
            pcie[known.name] = min([known.pcie_bytes_per_s, pcie.get(known.name, known.pcie_bytes_per_s), *limit])
            peers[known.name] = known.peer_bytes_per_s
    has_cpu = any(group.cpu for group, _ in groups)
    links = []
    for a, b in product(pcie, repeat=2):
        ends = {"source": f"{prefix}{a}-*", "target": f"{prefix}{b}-*", "scope": "same-host"}
        if a == b and peers[a]:
            sums = {"sum_latency_s": PEER_SUM_LATENCY_S, "sum_bytes_per_s": PEER_SUM_SHARE * peers[a]}
            links.append(_link({**ends, **sums}, PEER_LATENCY_S, peers[a], "nvlink-out:{source}", "nvlink-in:{target}"))
        else:
            links.append(_link(ends, PCIE_LATENCY_S, min(pcie[a], pcie[b]), "pcie-out:{source}", "pcie-in:{target}"))
    for kind, rate in pcie.items() if has_cpu else ():
        gpu, cpu = f"{prefix}{kind}-*", f"{prefix}cpu*"
        ends = {"source": gpu, "target": cpu, "scope": "same-host"}
        links.append(_link(ends, PCIE_LATENCY_S, rate, "pcie-out:{source}"))
        links.append(_link({**ends, "source": cpu, "target": gpu}, PCIE_LATENCY_S, rate, "pcie-in:{target}"))
    if has_cpu:
        cpu = f"{prefix}cpu*"
        links.append(
            Link(
                source=cpu,
                target=cpu,
                scope="same-host",
                latency_s=PROCESS_LATENCY_S,
                bytes_per_s=PROCESS_BYTES_PER_S,
            )
        )
    return links


def _link(form: Mapping[str, object], latency_s: float, stated: float, *wires: str) -> Link:
    rate = LINK_EFFICIENCY * stated
    return Link.model_validate(
        {**form, "latency_s": latency_s, "bytes_per_s": rate, "wires": wires, "sum_start_s": SUM_START_S}
    )
