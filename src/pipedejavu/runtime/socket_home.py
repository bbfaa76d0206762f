"""The socket on which a GPU's host work runs: a pure function of a host's topology, and how threads are bound to it.

A host with several sockets has several NUMA nodes, each with its own memory. Threads that update the state of a GPU run
on the node that its PCIe lanes end at; memory that they touch first is mapped there, so pinned memory and state follow
them. On a host with one node nothing is bound.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_NODES = "sys/devices/system/node"


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The NUMA nodes of a host."""

    cores: Mapping[int, tuple[int, ...]]
    """By node with cores: their numbers, hyperthreads included."""
    gpus: Mapping[str, int]
    """By PCI address of a GPU: its node. GPUs whose node the system does not state are left out."""


@dataclass(frozen=True, kw_only=True)
class SocketHome:
    """Where the host work of a GPU runs, and why."""

    node: int | None
    """None if threads are not bound."""
    cores: tuple[int, ...]
    """Those that its threads run on, of the cores that the process may use."""
    reason: str


def home_of(topology: Topology, gpu: str | None, allowed: Collection[int]) -> SocketHome:
    """Returns where the host work of a GPU runs; `allowed` are the cores that the process may use."""
    every = tuple(sorted(allowed))
    nodes = {node: tuple(sorted({*cores} & {*allowed})) for node, cores in topology.cores.items()}
    usable = [node for node, cores in nodes.items() if cores]
    if len(usable) < 2:
        return SocketHome(node=None, cores=every, reason="the process has the cores of one NUMA node")
    node = topology.gpus.get(gpu or "")
    if node is None:
        return SocketHome(
            node=None, cores=every, reason=f"the system does not state the NUMA node of {gpu or 'a device'}"
        )
    if node not in usable:
        return SocketHome(
            node=None, cores=every, reason=f"GPU {gpu} is on node {node}, of which the process may use no core"
        )
    return SocketHome(
        node=node, cores=nodes[node], reason=f"GPU {gpu} is on node {node}; its host memory is mapped there too"
    )


def read_topology(root: Path = Path("/")) -> Topology:
    """Reads the topology that Linux states; without it, one node with no GPUs."""
    cores = {}
    for folder in sorted((root / _NODES).glob("node[0-9]*")):
        numbers = _numbers(_text(folder / "cpulist"))
        if numbers:
            cores[int(folder.name.removeprefix("node"))] = numbers
    gpus = {}
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        if _text(device / "class").startswith("0x03") and _text(device / "numa_node").isdigit():  # -1: not stated
            gpus[device.name.lower()] = int(_text(device / "numa_node"))
    return Topology(cores=cores, gpus=gpus)


def describe_homes(topology: Topology, allowed: Collection[int]) -> list[str]:
    """Returns a sentence for each GPU of a host with several nodes, or one for a host with one."""
    if len(topology.cores) < 2:
        return ["NUMA nodes: 1, so no thread is bound"]
    homes = [home_of(topology, gpu, allowed) for gpu in topology.gpus] or [home_of(topology, None, allowed)]
    return [
        f"NUMA nodes: {len(topology.cores)}; host work on {len(home.cores)} cores"
        f"{'' if home.node is None else f' of node {home.node}'}: {home.reason}"
        for home in homes
    ]


def own_cores() -> set[int]:
    """Returns the cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {*range(os.cpu_count() or 1)}


def home_of_device(device: "torch.device") -> SocketHome:
    """Returns where the host work of a torch device runs on this host."""
    address = None
    if device.type == "cuda":
        import torch  # `doctor` also works without it

        parts = torch.cuda.get_device_properties(device)
        ids: list[Any] = [getattr(parts, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
        if None not in ids:
            address = "{:04x}:{:02x}:{:02x}.0".format(*ids)
    return home_of(read_topology(), address, own_cores())


@contextmanager
def bound_to(home: SocketHome) -> Iterator[None]:
    """A context in which threads that start inherit the cores of a home; without a node, all cores."""
    if home.node is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, home.cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _numbers(text: str) -> tuple[int, ...]:
    """Returns the numbers of a list such as '0-3,8-11'."""
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)
