"""What the operating system states about this host; anything that it does not state is unknown, never an error."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipedejavu.probe.machine_shape import num_cores, total_memory_bytes

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
        memory_bytes=min(total_memory_bytes(), _limit_bytes(root) or total_memory_bytes()),
        processor=processor,
        sockets=sockets,
        numa_nodes=numa_nodes,
        instruction_sets=sets,
        unknown=tuple(f"{name}: the operating system does not say" for name, value in stated if not value),
    )


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes that can be allocated now without swapping, within the container's limit."""
    stated = dict(_pairs(_text(root / "proc/meminfo"))).get("MemAvailable", "").split()
    free = int(stated[0]) * 1024 if stated else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    limit, used = _limit_bytes(root), _text(root / "sys/fs/cgroup/memory.current")
    if not limit or not used.isdigit():
        return free
    cached = re.search(r"^inactive_file (\d+)$", _text(root / "sys/fs/cgroup/memory.stat"), re.MULTILINE)
    return max(0, min(free, limit - int(used) + int(cached[1] if cached else 0)))


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


def _limit_bytes(root: Path) -> int | None:
    """Returns a container's memory limit from cgroups v2 or v1, or None without a limit."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = _text(root / "sys/fs/cgroup" / name)
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None
