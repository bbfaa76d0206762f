"""The limits of a process, read from trees of files as cgroups v1 and v2 write them."""

import os
from pathlib import Path

import pytest

from pipedejavu.runtime.host_limit import free_host_bytes, host_limit_bytes

GIB = 2**30
PAGE = os.sysconf("SC_PAGE_SIZE")


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {100 * 2**20} kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_limits_what_is_available_is_free(tmp_path: Path) -> None:
    assert free_host_bytes(write(tmp_path, {}), -1) == 100 * GIB
    assert host_limit_bytes(tmp_path) is None


@pytest.mark.parametrize(
    ("cgroup", "folder"),
    [("0::/", "sys/fs/cgroup"), ("0::/slice/job", "sys/fs/cgroup/slice"), ("0::/../slice", "sys/fs/cgroup/slice"),
     ("", "sys/fs/cgroup")],
)  # fmt: skip
def test_limits_of_cgroups_v2_count_with_those_of_all_above(cgroup: str, folder: str, tmp_path: Path) -> None:
    files = {
        "memory.max": f"{8 * GIB}\n",
        "memory.current": f"{5 * GIB}\n",
        "memory.stat": f"anon 1\ninactive_file {GIB}\n",
    }
    write(tmp_path, {"proc/self/cgroup": f"{cgroup}\n", **{f"{folder}/{name}": text for name, text in files.items()}})
    write(tmp_path, {"sys/fs/cgroup/slice/job/memory.max": "max\n"})
    assert host_limit_bytes(tmp_path) == 8 * GIB
    assert free_host_bytes(tmp_path, -1) == 4 * GIB


def test_the_smallest_of_nested_limits_counts(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/slice/job\n"}
    for folder, limit, used in (("slice", 20, 15), ("slice/job", 10, 2)):
        files |= {f"sys/fs/cgroup/{folder}/memory.max": f"{limit * GIB}",
                  f"sys/fs/cgroup/{folder}/memory.current": f"{used * GIB}"}  # fmt: skip
    write(tmp_path, files)
    assert host_limit_bytes(tmp_path) == 10 * GIB
    assert free_host_bytes(tmp_path, -1) == 5 * GIB


@pytest.mark.parametrize("path", ["/", "/docker/abc"])
def test_limits_of_cgroups_v1(path: str, tmp_path: Path) -> None:
    folder = f"sys/fs/cgroup/memory{path}".rstrip("/")
    files = {
        "limit_in_bytes": f"{6 * GIB}",
        "usage_in_bytes": f"{2 * GIB}",
        "stat": "inactive_file 7\ntotal_inactive_file 4096",
    }
    write(tmp_path, {"proc/self/cgroup": f"5:cpu,cpuacct:/elsewhere\n4:memory:{path}\n",
                     **{f"{folder}/memory.{name}": text for name, text in files.items()}})  # fmt: skip
    assert host_limit_bytes(tmp_path) == 6 * GIB
    assert free_host_bytes(tmp_path, -1) == 4 * GIB + 4096


def test_no_limit_of_cgroups_v1_is_a_large_number(tmp_path: Path) -> None:
    write(tmp_path, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"})
    assert host_limit_bytes(tmp_path) is None


def test_the_address_space_limits_what_is_free(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/statm": "1000 50 20 1 0 30 0\n"})
    assert free_host_bytes(tmp_path, GIB) == GIB - 1000 * PAGE
    assert free_host_bytes(tmp_path, 999 * PAGE) == 0
