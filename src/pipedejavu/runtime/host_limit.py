"""What this process may take from its host: the memory that is free, within cgroups and the address space limit.

Reads files of the operating system only; what it does not state sets no limit.
"""

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
_UNLIMITED_BYTES = 1 << 60
"""cgroups v1 states no limit as a number near 2^63."""


def free_host_bytes(root: Path = ROOT, address_space_bytes: int | None = None) -> int:
    """Returns the bytes that this process can still allocate without swapping.

    Args:
        root: the folder that holds `proc` and `sys`.
        address_space_bytes: the limit of the address space; by default RLIMIT_AS.
    """
    stated = re.search(r"^MemAvailable:\s*(\d+)", _text(root / "proc/meminfo"), re.MULTILINE)
    sizes = [int(stated[1]) * 1024 if stated else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")]
    sizes += [limit - used for limit, used in _groups(root) if used is not None]
    if address_space_bytes is None:
        address_space_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
    pages = _text(root / "proc/self/statm").partition(" ")[0]
    if address_space_bytes != resource.RLIM_INFINITY and pages.isdigit():
        sizes.append(address_space_bytes - int(pages) * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(sizes))


def host_limit_bytes(root: Path = ROOT) -> int | None:
    """Returns the smallest memory limit of the cgroups of this process, or None without one."""
    return min((limit for limit, _ in _groups(root)), default=None)


def _groups(root: Path) -> Iterator[tuple[int, int | None]]:
    """Yields the limit of each cgroup with one, and the bytes in use, less cached files, which give way."""
    for folder, limit_name, used_name, cached_name in _folders(root):
        limit, used = _text(folder / limit_name), _text(folder / used_name)
        if not limit.isdigit() or int(limit) >= _UNLIMITED_BYTES:
            continue
        cached = re.search(rf"^{cached_name} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
        yield int(limit), max(0, int(used) - int(cached[1] if cached else 0)) if used.isdigit() else None


def _folders(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Yields the folders of the process's cgroups, v2 and v1, with all above them, and the names of their files."""
    v2 = (root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
    v1 = (root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    paths = {0: [""], 1: [""]}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers or "memory" in controllers.split(","):
            paths[1 if controllers else 0].append(path)
    for number, (base, *names) in enumerate((v2, v1)):
        folders = dict.fromkeys(base.joinpath(*part) for path in paths[number] for part in _ancestors(path))
        for folder in folders:
            yield folder, names[0], names[1], names[2]


def _ancestors(path: str) -> Iterator[list[str]]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for count in range(len(parts) + 1):
        yield parts[:count]


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""
