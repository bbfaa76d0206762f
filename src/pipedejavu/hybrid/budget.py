"""Memory budgets, and measurements of real steps: the GPU memory and the forward time of each unit."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from pipedejavu.facts import InputError, format_bytes
from pipedejavu.hybrid.placement import Limits, MemoryInterval, Place, UnitSize, gpu_peak
from pipedejavu.hybrid.unit_state import UnitState, size_of
from pipedejavu.runtime.host_memory import Progress as Report

Budget = int | Literal["auto"]

GPU_SHARE, HOST_SHARE = 0.97, 0.92
"""Shares of the free memory that `auto` uses; the rest is for fragmentation and other processes."""
SHOWN_FROM_BYTES = 2**31
"""The size from which an allocation shows a progress bar."""


class MemoryMeter:
    """Measures the GPU memory of the first step, unit by unit, and knows the budgets."""

    def __init__(self, device: torch.device, gpu_budget: Budget, host_budget: Budget):
        for name, budget in (("gpu_budget", gpu_budget), ("host_budget", host_budget)):
            if budget != "auto" and (not isinstance(budget, int) or budget <= 0):
                raise InputError(f"{name} is {budget!r}; give a number of bytes above 0, or 'auto'")
        self.device, self._gpu_budget = device, gpu_budget
        self._host_bytes = int(free_host_bytes() * HOST_SHARE) if host_budget == "auto" else host_budget
        self._left: dict[int, int] = {}
        self._intervals: list[MemoryInterval] = []
        self._forwards: list[MemoryInterval] = []
        self._base_bytes = self._gradient_bytes = 0

    def check(self, sizes: Sequence[UnitSize], keeps_gradients: bool, num_first: int | None) -> None:
        """Raises InputError if weights and state cannot fit even without activations; allocates nothing."""
        count = num_first or 0
        if not 0 <= count <= len(sizes):
            raise InputError(f"gpu_units is {count} and the model has {len(sizes)} units; give 0 to {len(sizes)}")
        places: list[Place] = ["gpu" if n < count and not u.is_bound_to_host else "host" for n, u in enumerate(sizes)]
        needed = gpu_peak(sizes, (), places, keeps_gradients)
        if self._gpu_budget != "auto" and needed > self._gpu_budget:
            raise InputError(
                f"weights and state take {format_bytes(needed)} of the GPU without any activation, and gpu_budget is"
                f" {format_bytes(self._gpu_budget)}; give more than {format_bytes(needed)}"
            )
        pool = self.limits(keeps_gradients, num_first)
        least = sum(size.weight_bytes + size.no_copy_bytes for size in sizes)
        if least > pool.gpu_bytes + pool.host_bytes:
            raise InputError(
                f"weights, state and gradients take at least {format_bytes(least)}, and both budgets together are"
                f" {format_bytes(pool.gpu_bytes + pool.host_bytes)} ({format_bytes(pool.gpu_bytes)} of the GPU,"
                f" {format_bytes(pool.host_bytes)} of the host); give {format_bytes(least)} or more"
            )

    def limits(self, keeps_gradients: bool, num_first: int | None) -> Limits:
        """Returns the budgets in bytes.

        `auto` is a share of the memory that was free at first; on the GPU, of what is free or reserved by torch now.
        """
        gpu = self._gpu_budget
        if gpu == "auto":
            free = free_host_bytes()
            if self.device.type == "cuda":
                free = torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
            gpu = int(free * GPU_SHARE)
        return Limits(gpu_bytes=gpu, host_bytes=self._host_bytes, keeps_gradients=keeps_gradients, num_first=num_first)

    def begin(self, unit_states: Sequence[UnitState]) -> None:
        """Starts to measure a step; the weights on the GPU are not counted."""
        self._intervals, self._forwards, self._gradient_bytes = [], [], 0
        self._left = {unit_state.index: len(unit_state.params) for unit_state in unit_states}
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._base_bytes = sum(size_of(unit_state).weight_bytes for unit_state in unit_states)

    def saw_forward(self, unit_state: UnitState) -> None:
        """Records that the forward of a unit begins, which ends the interval of the unit before."""
        peak = self._peak()
        if self._forwards:
            self._forwards[-1] = MemoryInterval(unit=self._forwards[-1].unit, peak_bytes=peak)
        self._forwards.append(MemoryInterval(unit=unit_state.index, peak_bytes=peak))

    def _peak(self) -> int:
        """Returns the peak of memory since the last call, without weights and gradients."""
        if self.device.type != "cuda":
            return 0
        peak = torch.cuda.max_memory_allocated(self.device) - self._base_bytes - self._gradient_bytes
        torch.cuda.reset_peak_memory_stats(self.device)
        return max(0, peak)

    def saw_gradient(self, unit_state: UnitState, size: int) -> None:
        """Records a gradient; the last gradient of a unit ends its interval."""
        self._left[unit_state.index] -= 1
        if self._left[unit_state.index] == 0:
            peak = self._peak()
            if not self._intervals and self._forwards:  # the last forward, the loss, and the first backward
                self._forwards[-1] = MemoryInterval(unit=self._forwards[-1].unit, peak_bytes=peak)
                peak = max(peak, *(forward.peak_bytes for forward in self._forwards))
            self._intervals.append(MemoryInterval(unit=unit_state.index, peak_bytes=peak))
            self._gradient_bytes += size

    @property
    def forwards(self) -> list[MemoryInterval]:
        """The intervals of the forward pass, in order; the last one extends into the backward pass."""
        return self._forwards

    @property
    def intervals(self) -> list[MemoryInterval]:
        """The intervals of the backward pass, in order."""
        return self._intervals


class ForwardClock:
    """Times the forward of each unit on a GPU, without the wait for its weights."""

    def __init__(self) -> None:
        self._events: dict[int, tuple[torch.cuda.Event, torch.cuda.Event]] = {}

    def note(self, index: int, wait: Callable[[], None]) -> None:
        """Calls `wait` for the weights of a unit, between two events if this is its first forward."""
        if index in self._events:
            wait()
            return
        came = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        came.record()
        wait()
        began.record()
        self._events[index] = came, began

    def seconds(self) -> dict[int, float]:
        """Returns the seconds from the start of each unit to the wait of the next; the last unit has none."""
        torch.cuda.synchronize()
        events = list(self._events.items())
        following = [came for _, (came, _) in events[1:]]
        return {n: began.elapsed_time(end) / 1e3 for (n, (_, began)), end in zip(events, following, strict=False)}


def free_host_bytes() -> int:
    """Returns the host memory that is available now, within the limits of the process's cgroup."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        group = Path("/sys/fs/cgroup")
        return min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError, StopIteration):
        return free


@contextmanager
def pinning_progress(size_bytes: int) -> Iterator[Report]:
    """Shows a progress bar while host memory is allocated, if it is large."""
    if size_bytes < SHOWN_FROM_BYTES:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("host memory", total=size_bytes)
        yield lambda size: bar.advance(task, size)
