"""What the operating system says, read from trees of files that say more, less or nothing."""

from pathlib import Path

from pipedejavu.probe.host import free_memory_bytes, read_host

CPUINFO = """processor : 0
model name : Intel(R) Xeon(R)   Platinum 8480+
physical id : 0
flags : fpu avx avx2 fma avx512f avx512_bf16 amx_tile amx_bf16

processor : 1
model name : Intel(R) Xeon(R)   Platinum 8480+
physical id : 1
flags : fpu avx avx2 fma avx512f avx512_bf16 amx_tile amx_bf16
"""


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_host_that_says_everything(tmp_path: Path) -> None:
    host = read_host(write(tmp_path, proc__cpuinfo=CPUINFO, sys__devices__system__node__online="0-1,4\n"))
    assert host.processor == "Intel(R) Xeon(R) Platinum 8480+"
    assert (host.sockets, host.numa_nodes) == (2, 3)
    assert host.instruction_sets == ("avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
    assert host.unknown == ()


def test_a_host_that_says_nothing(tmp_path: Path) -> None:
    host = read_host(tmp_path)
    assert (host.processor, host.sockets, host.numa_nodes, host.instruction_sets) == ("", None, None, ())
    assert [line.partition(":")[0] for line in host.unknown] == [
        "the model of the processor", "sockets", "NUMA nodes", "instruction sets"
    ]  # fmt: skip
    assert host.cores >= 1
    assert host.memory_bytes > 0
    assert free_memory_bytes(tmp_path) > 0


def test_an_arm_host_names_its_features(tmp_path: Path) -> None:
    host = read_host(write(tmp_path, proc__cpuinfo="Features : fp asimd sve sve2 bf16\n"))
    assert host.instruction_sets == ("asimd", "sve", "sve2", "bf16")


def test_a_container_has_its_limits(tmp_path: Path) -> None:
    files = {"cpu_dot_max": "100000 100000", "memory_dot_max": str(1 << 30), "memory_dot_current": str(1 << 28)}
    root = write(tmp_path, **{f"sys__fs__cgroup__{name}": text for name, text in files.items()})
    host = read_host(write(root, proc__meminfo="MemTotal: 99 kB\nMemAvailable: 999999999 kB\n"))
    assert (host.cores, host.memory_bytes) == (1, 1 << 30)
    assert free_memory_bytes(root) == (1 << 30) - (1 << 28)
    write(root, sys__fs__cgroup__memory_dot_stat="anon 5\ninactive_file 4096\n")  # cached files give way
    assert free_memory_bytes(root) == (1 << 30) - (1 << 28) + 4096


def test_limits_that_are_none_do_not_count(tmp_path: Path) -> None:
    without = read_host(tmp_path)
    files = {"cpu_dot_max": "max 100000", "memory_dot_max": "max"}
    root = write(tmp_path, **{f"sys__fs__cgroup__{name}": text for name, text in files.items()})
    assert read_host(root) == without


def test_free_memory_is_what_is_available(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo="MemTotal: 99 kB\nMemFree: 1 kB\nMemAvailable: 50 kB\n")
    assert free_memory_bytes(tmp_path) == 50 * 1024
