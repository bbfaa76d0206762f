"""Why matrix products on this CPU are as fast as they are: what it has, what it lets a process use, what torch reaches.

    python bench/cpu_matmul.py [--largest 8192] [--threads 1 2 4 8 16]

Prints, in one run of less than a minute on 16 cores:
  1. the CPU's flags and siblings, the quota and the affinity of this process, whether the kernel grants tiles (AMX);
  2. what the tiles reach by themselves, in a loop of C without memory traffic: the bound for everything below;
  3. which kernel oneDNN takes under each limit of its instruction set, and how fast that is;
  4. TFLOP/s of fp32, bf16 and int8 by shape and by call, on all threads;
  5. the same by the number of threads, with the clock and the throttling while it ran;
  6. what the memory of a result costs: fresh from the system, in huge pages, from a heap that is kept, or given.

How to read it: a refusal in 1, or no tiles in 2, says that oneDNN must do without. Where 2 reaches more than 4, the
kernel's name in 3 says whether oneDNN took the tiles. Where 2 stops growing at half of the threads, two threads share
the tiles of a core.
"""

import argparse
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

CELL_S = 0.12
"""How long each rate is measured, behind one call that warms up."""
LIMITS = ("", "AVX512_CORE_AMX", "AVX512_CORE_BF16", "AVX512_CORE")
MEMORIES = {
    "fresh from the system": {},
    "in huge pages": {"THP_MEM_ALLOC_ENABLE": "1"},
    "from a heap that is kept": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)},
    "threads bound to cores": {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"},
}
"""What glibc, torch and OpenMP are told by the environment."""
SQUARES = (1024, 2048, 4096, 8192)
LINEARS = ((128, 4096, 4096), (4096, 1024, 4096), (4096, 4096, 1024), (16384, 768, 3072))
"""Samples or tokens, features in, features out."""

ARCH_PRCTL, GET_SUPPORTED, GET_GRANTED, REQUEST, TILE_DATA = 158, 0x1021, 0x1022, 0x1023, 18

TILES = r"""
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static double limit_s;
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }

/* Six tiles add up products of two others; a product has 16 × 16 × 32 multiply-adds. */
static void *work(void *out) {
    struct { uint8_t palette, row, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape;
    static const uint8_t zero[1024];
    memset(&shape, 0, sizeof shape);
    shape.palette = 1;
    for (int n = 0; n < 8; n++) { shape.bytes[n] = 64; shape.rows[n] = 16; }
    _tile_loadconfig(&shape);
    _tile_loadd(6, zero, 64);
    _tile_loadd(7, zero, 64);
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3); _tile_zero(4); _tile_zero(5);
    double start = now(), end;
    long products = 0;
    do {
        for (int n = 0; n < 2000; n++) {
            _tile_dpbf16ps(0, 6, 7); _tile_dpbf16ps(1, 6, 7); _tile_dpbf16ps(2, 6, 7);
            _tile_dpbf16ps(3, 6, 7); _tile_dpbf16ps(4, 6, 7); _tile_dpbf16ps(5, 6, 7);
        }
        products += 12000;
    } while ((end = now()) - start < limit_s);
    _tile_release();
    *(double *)out = products * 2.0 * 16 * 16 * 32 / (end - start);
    return 0;
}

int main(int argc, char **argv) {
    limit_s = atof(argv[1]);
    if (syscall(SYS_arch_prctl, 0x1023, 18)) { perror("the kernel refuses tiles"); return 1; }
    for (int arg = 2; arg < argc; arg++) {
        int threads = atoi(argv[arg]);
        pthread_t id[threads];
        double rate[threads], sum = 0;
        for (int n = 0; n < threads; n++) pthread_create(&id[n], 0, work, &rate[n]);
        for (int n = 0; n < threads; n++) { pthread_join(id[n], 0); sum += rate[n]; }
        printf("%d threads %.2f TFLOP/s\n", threads, sum / 1e12);
    }
    return 0;
}
"""


def read(path: str) -> str:
    """Returns a file of the kernel's, or why it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        return f"({error.strerror})"


def permission() -> str:
    """Asks the kernel for tiles, as oneDNN does."""
    libc = ctypes.CDLL(None, use_errno=True)
    found = ctypes.c_uint64(0)
    lines = []
    for name, code in (("supported", GET_SUPPORTED), ("granted", GET_GRANTED)):
        failed = libc.syscall(ARCH_PRCTL, code, ctypes.byref(found))
        has = "tiles" if found.value >> TILE_DATA & 1 else "no tiles"
        lines.append(f"{name}: {os.strerror(ctypes.get_errno()) if failed else f'{found.value:#x}, {has}'}")
    failed = libc.syscall(ARCH_PRCTL, REQUEST, TILE_DATA)
    lines.append(f"request: {os.strerror(ctypes.get_errno()) if failed else 'granted'}")
    return "; ".join(lines)


def print_facts() -> None:
    text = read("/proc/cpuinfo")
    flags = set(re.search(r"^flags\s*:(.*)", text, re.M)[1].split()) if "flags" in text else set()
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
    names = Counter(re.findall(r"^model name\s*:\s*(.*)", text, re.M))
    print("1. what is there")
    print("  cpu          ", ", ".join(f"{n} × {name}" for name, n in names.items()))
    print("  flags        ", " ".join(flag if flag in flags else f"no-{flag}" for flag in wanted))
    print(
        "  siblings     ", read("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list"), "share a core with cpu 0"
    )
    quota = read("/sys/fs/cgroup/cpu.max")
    if quota.startswith("("):
        quota = " ".join(read(f"/sys/fs/cgroup/cpu/cpu.cfs_{what}_us") for what in ("quota", "period"))
    print("  affinity     ", len(os.sched_getaffinity(0)), "cpus; quota and period", quota)
    print("  kernel       ", os.uname().release, "|", read("/proc/version")[:70])
    print("  tiles        ", permission())
    cpu = torch.cpu
    tile = {name: getattr(cpu, name)() for name in ("_is_amx_tile_supported", "_init_amx") if hasattr(cpu, name)}
    print("  torch        ", torch.__version__, torch.backends.cpu.get_cpu_capability(), tile)
    print(
        "  built with   ",
        "; ".join(re.findall(r"(?:Intel\(R\) MKL-DNN|oneDNN|oneAPI Math)[^\n]*", torch.__config__.show())),
    )


def print_tiles(threads: list[int]) -> None:
    print("2. tiles by themselves, bf16")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        print("  there is no C compiler to try them with")
        return
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "tiles.c"), str(Path(folder, "tiles"))
        source.write_text(TILES)
        build = [compiler, "-O2", "-mamx-tile", "-mamx-bf16", "-pthread", str(source), "-o", program]
        done = subprocess.run(build, capture_output=True, text=True)
        if done.returncode == 0:
            done = subprocess.run([program, "0.3", *map(str, threads)], capture_output=True, text=True)
        lines = (done.stdout + done.stderr).strip().splitlines()
        print(*(f"  {line}" for line in lines[:20]), sep="\n")
        if done.returncode:
            print(f"  ended with {done.returncode}" + " (no such instruction)" * (done.returncode == -4))


def rate(call: Callable[[], object], flop: float) -> float:
    """Returns TFLOP/s."""
    call()
    start, count = time.perf_counter(), 0
    while True:
        call()
        count += 1
        taken_s = time.perf_counter() - start
        if taken_s > CELL_S:
            return flop * count / taken_s / 1e12


def calls(m: int, k: int, n: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Returns ways to multiply m×k by k×n; a Linear's weight is n×k."""
    if dtype == torch.int8:
        a, b = torch.randint(-9, 9, (m, k), dtype=dtype), torch.randint(-9, 9, (n, k), dtype=dtype)
        return {"_int_mm": lambda: torch._int_mm(a, b.t())}
    x, w, g = (torch.randn(*size).to(dtype) for size in ((m, k), (n, k), (m, n)))
    found: dict[str, Callable[[], object]] = {
        "linear": lambda: functional.linear(x, w),
        "inputs": lambda: torch.mm(g, w),
        "weights": lambda: torch.mm(g.t(), x),
    }
    packed = packed_weight(w, m)
    if packed is not None:
        found["packed"] = lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return found


def packed_weight(weight: Tensor, rows: int) -> Tensor | None:
    """Returns a weight in the layout that oneDNN likes best, where torch can."""
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        torch.ops.mkldnn._linear_pointwise(weight.new_zeros(rows, weight.shape[1]), packed, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return None
    return packed


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


def print_limits(size: int) -> None:
    print(f"3. oneDNN under limits of its instruction set, bf16 linear of {size} squares on all threads")
    for limit in LIMITS:
        done = child({"ONEDNN_VERBOSE": "1", **({"ONEDNN_MAX_CPU_ISA": limit} if limit else {})}, size)
        kernels = Counter(
            fields[fields.index(kind) + 1]
            for fields in (line.split(",") for line in done.splitlines() if ",exec," in line)
            for kind in ("matmul", "inner_product")
            if kind in fields
        )
        isa = re.search(r"info,cpu,isa:(.*)", done)
        speed = done.strip().rpartition("\n")[2].split()[0]
        used = ", ".join(kernels) or "no kernel of oneDNN"
        print(
            f"  {limit or '(no limit)':18} {speed:>7} TFLOP/s  {used}  [{isa[1] if isa else 'isa not told'}]",
            flush=True,
        )


def print_memories(size: int) -> None:
    print(f"6. TFLOP/s of bf16 linear of {size} squares, of mm into a result that is given, GB/s of a sum of 64 MB")
    for name, more in MEMORIES.items():
        rates = child(more, size).strip().rpartition("\n")[2].split()
        print(f"  {name:26} {' '.join(f'{rate:>8}' for rate in rates)}", flush=True)


def child(more: dict[str, str], size: int) -> str:
    """Runs this file in such an environment; returns what it prints, the rates last."""
    command = [sys.executable, __file__, "--child", str(size)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **more}, timeout=120)
    return done.stdout if done.returncode == 0 else f"{done.stderr[-200:]}\nfailed"


def be_child(size: int) -> None:
    x, w, y = (torch.randn(size, size, dtype=torch.bfloat16) for _ in range(3))
    vector = torch.randn(16 << 20)
    linear = rate(lambda: functional.linear(x, w), 2.0 * size**3)
    given = rate(lambda: torch.mm(x, w.t(), out=y), 2.0 * size**3)
    added = rate(lambda: vector + 1, 2e3 * vector.nbytes)
    print(f"{linear:.2f} {given:.2f} {added:.1f}")


def print_shapes(largest: int) -> None:
    print("4. TFLOP/s on all threads (m × k → n; 'inputs' and 'weights' are mm for the gradients of a Linear)")
    shapes = [(n, n, n) for n in SQUARES if n <= largest] + [s for s in LINEARS if max(s) <= 4 * largest]
    for name, dtype in (*DTYPES.items(), ("fp32 'medium'", torch.float32)):
        torch.set_float32_matmul_precision("medium" if "medium" in name else "highest")
        for m, k, n in shapes:
            if "medium" in name and m > 4096:
                continue
            cells = []
            for call, function in calls(m, k, n, dtype).items():
                try:
                    cells.append(f"{call} {rate(function, 2.0 * m * k * n):.2f}")
                except RuntimeError as error:
                    cells.append(f"{call} – ({str(error).splitlines()[0][:60]})")
            print(f"  {name:13} {m:>5} × {k:>4} → {n:<4}  {'  '.join(cells)}", flush=True)
    torch.set_float32_matmul_precision("highest")


class Clock(threading.Thread):
    """Reads the clock of all cpus while something runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.mhz: list[float] = []
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.05):
            self.mhz += map(float, re.findall(r"^cpu MHz\s*:\s*(\S+)", read("/proc/cpuinfo"), re.M))

    def stop(self) -> str:
        self.ended.set()
        self.join()
        return f"{min(self.mhz):.0f}–{max(self.mhz):.0f} MHz" if self.mhz else "clock not told"


def throttled() -> int:
    found = re.search(r"nr_throttled (\d+)", read("/sys/fs/cgroup/cpu.stat"))
    return int(found[1]) if found else 0


def stolen() -> int:
    """Returns ticks that the hypervisor gave to others."""
    fields = read("/proc/stat").split("\n")[0].split()
    return int(fields[8]) if len(fields) > 8 else 0


def print_threads(threads: list[int], size: int) -> None:
    print(f"5. TFLOP/s of linear, {size} squares, by threads")
    for number in threads:
        torch.set_num_threads(number)
        before, lost, clock = throttled(), stolen(), Clock()
        clock.start()
        cells = []
        for name in ("fp32", "bf16", "int8"):
            call, function = next(iter(calls(size, size, size, DTYPES[name]).items()))
            cells.append(f"{name} {rate(function, 2.0 * size**3):.2f} ({call})")
        facts = f"{clock.stop()}, throttled {throttled() - before} times, {stolen() - lost} ticks stolen"
        print(f"  {number:>3} threads  {'  '.join(cells)}  {facts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--largest", type=int, default=8192, help="the largest square")
    parser.add_argument("--threads", type=int, nargs="+", default=[n for n in (1, 2, 4, 8, 16, 32) if n <= cores])
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        be_child(asked.child)
        return
    start = time.perf_counter()
    middle = min(asked.largest, 4096)
    print_facts()
    print_tiles(asked.threads)
    print_limits(middle)
    print_shapes(asked.largest)
    print_threads(asked.threads, min(middle, 2048))
    print_memories(middle)
    print(f"({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
