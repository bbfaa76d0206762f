"""What the operating system says of this host. Whatever it does not say stays unknown; nothing here raises for it."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipedejavu.probe.shape import num_cores, total_memory_bytes

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
    sockets = len({value for key, value in lines if key == "physical id"}) or None
    flags = {flag for key, value in lines if key in ("flags", "Features") for flag in value.split()}
    found = {
        "the model of the processor": next((value for key, value in lines if key == "model name"), ""),
        "sockets": sockets,
        "NUMA nodes": _count(_text(root / "sys/devices/system/node/online")),
        "instruction sets": tuple(name for name in INSTRUCTION_SETS if name in flags),
    }
    limits = (total_memory_bytes(), _limit_bytes(root))
    return HostFacts(
        cores=max(1, min(num_cores(), math.floor(_quota(root)) if _quota(root) < math.inf else num_cores())),
        memory_bytes=min(limit for limit in limits if limit),
        processor=" ".join(str(found["the model of the processor"]).split()),
        sockets=sockets,
        numa_nodes=_count(_text(root / "sys/devices/system/node/online")),
        instruction_sets=tuple(name for name in INSTRUCTION_SETS if name in flags),
        unknown=tuple(f"{what}: the operating system does not say" for what, value in found.items() if not value),
    )


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Returns what could be allocated now without swapping; in a container, at most what its limit leaves."""
    stated = dict(_pairs(_text(root / "proc/meminfo"))).get("MemAvailable", "").split()
    free = int(stated[0]) * 1024 if stated else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    limit, used = _limit_bytes(root), _text(root / "sys/fs/cgroup/memory.current")
    return min(free, max(0, limit - int(used))) if limit and used.isdigit() else free


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


def _quota(root: Path) -> float:
    """Returns the cores that a container's quota allows."""
    limit, _, period = _text(root / "sys/fs/cgroup/cpu.max").partition(" ")
    return int(limit) / int(period) if limit.isdigit() and period.isdigit() else math.inf


def _limit_bytes(root: Path) -> int | None:
    """Returns the memory that a container may use, in either version of control groups."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = _text(root / "sys/fs/cgroup" / name)
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None
