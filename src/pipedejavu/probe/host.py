"""What the operating system says of this host. Whatever it does not say stays unknown; nothing here raises for it."""

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
"""Those that change how fast arithmetic is, as Linux spells them."""


@dataclass(frozen=True)
class HostFacts:
    """One host as its operating system describes it; None is unknown."""

    cores: int
    """Those that this process may use, by affinity and quota."""
    memory_bytes: int
    """Of the host, or of the container where that is less."""
    processor: str
    sockets: int | None
    numa_nodes: int | None
    instruction_sets: tuple[str, ...]
    unknown: tuple[str, ...]


def read_host(root: Path = Path("/")) -> HostFacts:
    """Reads what is known of this host; `root` is where its /proc and /sys are."""
    lines = list(_pairs(_text(root / "proc/cpuinfo")))
    flags = {flag for key, value in lines if key in ("flags", "Features") for flag in value.split()}
    processor = next((" ".join(value.split()) for key, value in lines if key == "model name"), "")
    sockets = len({value for key, value in lines if key == "physical id"}) or None
    numa_nodes = _count(_text(root / "sys/devices/system/node/online"))
    sets = tuple(name for name in INSTRUCTION_SETS if name in flags)
    names = ("the model of the processor", "sockets", "NUMA nodes", "instruction sets")
    found = zip(names, (processor, sockets, numa_nodes, sets), strict=True)
    return HostFacts(
        cores=max(1, min(num_cores(), _quota(root) or num_cores())),
        memory_bytes=min(total_memory_bytes(), _limit_bytes(root) or total_memory_bytes()),
        processor=processor,
        sockets=sockets,
        numa_nodes=numa_nodes,
        instruction_sets=sets,
        unknown=tuple(f"{name}: the operating system does not say" for name, value in found if not value),
    )


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Returns what could be allocated now without swapping; in a container, at most what its limit leaves."""
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
    """Counts what Linux lists as '0-3,8'."""
    try:
        ends = [part.split("-") for part in ranges.split(",")]
        return sum(int(end[-1]) - int(end[0]) + 1 for end in ends)
    except ValueError:
        return None


def _quota(root: Path) -> int | None:
    """Returns the whole cores that a container's quota allows."""
    limit, _, period = _text(root / "sys/fs/cgroup/cpu.max").partition(" ")
    return int(limit) // int(period) if limit.isdigit() and period.isdigit() else None


def _limit_bytes(root: Path) -> int | None:
    """Returns the memory that a container may use, in either version of control groups."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = _text(root / "sys/fs/cgroup" / name)
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None
