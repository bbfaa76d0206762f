"""What the operating system states about this host; anything that it does not state is unknown, never an error."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipedejavu.probe.machine_shape import num_cores, total_memory_bytes
from pipedejavu.runtime.host_limit import free_host_bytes, host_limit_bytes

INSTRUCTION_SETS = (
    "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_int8", "amx_bf16", "amx_fp16", "asimd", "asimdhp", "sve", "sve2", "bf16", "i8mm",
)  # fmt: skip
"""Instruction sets that affect the speed of arithmetic, as Linux spells them."""


@dataclass(frozen=True)
class HostFacts:
    """A host as its operating system describes it; None means unknown."""

    cores: int
    """Cores that this process may use, by affinity and quota."""
    memory_bytes: int
    """Memory of the host, or of the container if that is less."""
    processor: str
    sockets: int | None
    numa_nodes: int | None
    instruction_sets: tuple[str, ...]
    unknown: tuple[str, ...]


def read_host(root: Path = Path("/")) -> HostFacts:
    """Reads the facts of this host from /proc and /sys under `root`."""
    lines = list(_pairs(_text(root / "proc/cpuinfo")))
    flags = {flag for key, value in lines if key in ("flags", "Features") for flag in value.split()}
    processor = next((" ".join(value.split()) for key, value in lines if key == "model name"), "")
    sockets = len({value for key, value in lines if key == "physical id"}) or None
    numa_nodes = _count(_text(root / "sys/devices/system/node/online"))
    sets = tuple(name for name in INSTRUCTION_SETS if name in flags)
    names = ("the model of the processor", "sockets", "NUMA nodes", "instruction sets")
    stated = zip(names, (processor, sockets, numa_nodes, sets), strict=True)
    return HostFacts(
        cores=max(1, min(num_cores(), _quota(root) or num_cores())),
        memory_bytes=min(total_memory_bytes(), host_limit_bytes(root) or total_memory_bytes()),
        processor=processor,
        sockets=sockets,
        numa_nodes=numa_nodes,
        instruction_sets=sets,
        unknown=tuple(f"{name}: the operating system does not say" for name, value in stated if not value),
    )


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes that this process can allocate now without swapping, within all its limits."""
    return free_host_bytes(root)


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            yield key.strip(), value.strip()


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""


def _count(ranges: str) -> int | None:
    """Counts the members of a Linux list such as '0-3,8'."""
    try:
        ends = [part.split("-") for part in ranges.split(",")]
        return sum(int(end[-1]) - int(end[0]) + 1 for end in ends)
    except ValueError:
        return None


def _quota(root: Path) -> int | None:
    """Returns the number of whole cores in a container's quota, or None without a quota."""
    limit, _, period = _text(root / "sys/fs/cgroup/cpu.max").partition(" ")
    return int(limit) // int(period) if limit.isdigit() and period.isdigit() else None
