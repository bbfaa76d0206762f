"""Memory budgets, and measurements of real steps: the GPU memory and the forward time of each unit."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from pipedejavu.facts import InputError, format_bytes
from pipedejavu.hybrid.placement import Limits, MemoryInterval, Place, UnitSize, gpu_peak
from pipedejavu.hybrid.unit_state import UnitState, size_of
from pipedejavu.runtime.device_memory import DeviceMemory
from pipedejavu.runtime.host_limit import free_host_bytes
from pipedejavu.runtime.host_memory import Progress as Report
from pipedejavu.runtime.host_pages import warm_bytes, warm_host_memory

Budget = int | Literal["auto"]

ALLOCATED_SHARE, HOST_SHARE = 0.96, 0.92
"""Share of the GPU's budget that tensors may take, the rest is for fragmentation; and share of the host's free memory
that `auto` uses, the rest is for other processes."""
TIGHT_SHARE = 0.9
"""Share of the GPU's budget from which a plan may turn out not to fit."""
ROUNDING_BYTES = 2**20
"""What limits may differ by because the process's limit is a fraction of the device."""
SHOWN_FROM_BYTES = 2**31
"""The size from which an allocation shows a progress bar."""


class MemoryMeter:
    """Measures the GPU memory of the first step, unit by unit, and knows the budgets."""

    def __init__(
        self, device: torch.device, gpu_budget: Budget, host_budget: Budget, memory: DeviceMemory | None = None
    ):
        for name, budget in (("gpu_budget", gpu_budget), ("host_budget", host_budget)):
            if budget != "auto" and (not isinstance(budget, int) or budget <= 0):
                raise InputError(f"{name} is {budget!r}; give a number of bytes above 0, or 'auto'")
        self.memory = memory or DeviceMemory(device)
        if (
            gpu_budget != "auto"
            and self.memory.is_gpu
            and gpu_budget > (limit := self.memory.limit_bytes()) + ROUNDING_BYTES
        ):
            raise InputError(
                f"gpu_budget is {gpu_budget} bytes, and this process may take {limit} of {device}, less what other"
                " processes hold; give that or less, or 'auto'"
            )
        self._gpu_budget = gpu_budget
        free = free_host_bytes() + warm_bytes()
        self._host_bytes = int(free * HOST_SHARE) if host_budget == "auto" else host_budget
        self._left: dict[int, int] = {}
        self._intervals: list[MemoryInterval] = []
        self._forwards: list[MemoryInterval] = []
        self._base_bytes = self._gradient_bytes = self._coming_bytes = 0
        self._fragmentation_bytes = 0
        self.sends_all = False
        """Whether the first backward pass sends all gradients to the host, because the GPU could not hold them."""

    def check(self, sizes: Sequence[UnitSize], keeps_gradients: bool, num_first: int | None) -> None:
        """Raises InputError if weights and state cannot fit even without activations; allocates nothing."""
        count = num_first or 0
        if not 0 <= count <= len(sizes):
            raise InputError(f"gpu_units is {count} and the model has {len(sizes)} units; give 0 to {len(sizes)}")
        places: list[Place] = ["gpu" if n < count and not u.is_bound_to_host else "host" for n, u in enumerate(sizes)]
        needed = gpu_peak(sizes, (), places, keeps_gradients)
        pool = self.limits(keeps_gradients, num_first)
        if self._gpu_budget != "auto" and needed > pool.gpu_bytes:
            least = pool.budget_for(needed)
            raise InputError(
                f"weights and state take {format_bytes(least)} of the GPU without any activation, and gpu_budget is"
                f" {format_bytes(self._gpu_budget)}; give more than {format_bytes(least)}"
            )
        least = sum(size.weight_bytes + size.no_copy_bytes for size in sizes)
        if least > pool.gpu_bytes + pool.host_bytes:
            raise InputError(
                f"weights, state and gradients take at least {format_bytes(least)}, and both budgets together are"
                f" {format_bytes(pool.gpu_bytes + pool.host_bytes)} ({format_bytes(pool.gpu_bytes)} of the GPU,"
                f" {format_bytes(pool.host_bytes)} of the host); give {format_bytes(least)} or more"
            )

    def warm_host(self, sizes: Sequence[UnitSize], keeps_gradients: bool, num_first: int | None) -> None:
        """Starts to map the host memory that state takes at least, if it is much."""
        limits = self.limits(keeps_gradients, num_first)
        free = [size for size in sizes if not size.is_bound_to_host]
        on_gpu = sum(size.gpu_bytes for size in free)
        room = limits.gpu_bytes - sum(size.weight_bytes for size in sizes)
        share = min(1.0, max(0.0, room / on_gpu)) if on_gpu else 1.0
        least = sum(size.host_bytes for size in sizes if size.is_bound_to_host)
        least += int((1 - share) * sum(size.streamed_bytes for size in free))
        if self.memory.is_gpu and SHOWN_FROM_BYTES <= least <= limits.host_bytes:
            warm_host_memory(least)

    def budget_bytes(self) -> int:
        """Returns the bytes that torch may reserve: the budget, or with `auto` all that the process may take."""
        return self.memory.limit_bytes() if self._gpu_budget == "auto" else self._gpu_budget

    def tensor_bytes(self) -> int:
        """Returns the part of the GPU's budget that tensors may take."""
        return self.limits(False, None).gpu_bytes

    def limits(self, keeps_gradients: bool, num_first: int | None) -> Limits:
        """Returns what tensors may take of both budgets, in bytes.

        Of the GPU's budget, a share is left for fragmentation, or what was measured if that is more. `auto` for the
        host is a share of the memory that was free at first.
        """
        budget, lost, share = self.budget_bytes(), self._fragmentation_bytes, 1.0
        if self.memory.is_gpu or self._gpu_budget == "auto":
            share = ALLOCATED_SHARE
        return Limits(
            gpu_bytes=max(0, min(int(budget * share), budget - lost)), host_bytes=self._host_bytes,
            keeps_gradients=keeps_gradients, num_first=num_first, allocated_share=share, fragmentation_bytes=lost,
        )  # fmt: skip

    def measure_fragmentation(self) -> None:
        """Measures what the allocator keeps of the device beside tensors, after it has returned what it can."""
        self.memory.release()
        self._fragmentation_bytes = max(0, self.memory.reserved_bytes() - self.memory.allocated_bytes())

    def cap(self) -> Callable[[], None]:
        """Makes the allocator keep to a budget that was given; returns a call that restores its limit."""
        return (lambda: None) if self._gpu_budget == "auto" else self.memory.cap(self._gpu_budget)

    def begin(self, unit_states: Sequence[UnitState]) -> None:
        """Starts to measure a step; the weights on the GPU are not counted."""
        sizes = {unit_state.index: size_of(unit_state) for unit_state in unit_states}
        self._intervals, self._forwards, self._gradient_bytes = [], [], 0
        self._left = {unit_state.index: len(unit_state.params) for unit_state in unit_states}
        self._coming_bytes = sum(size.gradient_bytes for size in sizes.values() if not size.is_bound_to_host)
        self.memory.reset_peak()
        self._base_bytes = sum(size.weight_bytes for size in sizes.values()) if self.memory.is_gpu else 0

    def is_tight(self, reserved_bytes: int | None) -> bool:
        """Returns whether the backward pass could need more of the GPU than the budget.

        Without a plan, whose predicted bytes are given, it is assumed to take all gradients at most, and as much
        temporary memory as the forward pass took.
        """
        if reserved_bytes is not None:
            return self.memory.is_gpu and reserved_bytes > TIGHT_SHARE * self.budget_bytes()
        allocated = self.memory.allocated_bytes()
        temporary = max(0, self.memory.peak_bytes() - allocated)
        most = allocated + self._coming_bytes + 2 * temporary
        return self.memory.is_gpu and most > ALLOCATED_SHARE * self.budget_bytes()

    def wants_gradients_to_leave(self) -> bool:
        """Returns whether the GPU cannot hold the gradients that are still to come in the first backward pass."""
        if self.sends_all:
            return True
        coming = self.memory.allocated_bytes() + self._coming_bytes
        return self.memory.is_gpu and coming > ALLOCATED_SHARE * self.budget_bytes()

    def saw_leave(self, size: int) -> None:
        """Records that gradients of this size, which were counted, have left the GPU."""
        self._gradient_bytes -= size

    def saw_forward(self, unit_state: UnitState) -> None:
        """Records that the forward of a unit begins, which ends the interval of the unit before."""
        peak = self._peak()
        if self._forwards:
            self._forwards[-1] = MemoryInterval(unit=self._forwards[-1].unit, peak_bytes=peak)
        self._forwards.append(MemoryInterval(unit=unit_state.index, peak_bytes=peak))

    def _peak(self) -> int:
        """Returns the peak of memory since the last call, without weights and gradients."""
        peak = self.memory.peak_bytes() - self._base_bytes - self._gradient_bytes
        self.memory.reset_peak()
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
            self._coming_bytes -= size

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
        self._end: torch.cuda.Event | None = None

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

    def end(self) -> None:
        """Notes the end of the backward pass."""
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end.record()

    @property
    def rest_s(self) -> float:
        """The seconds from the start of the last unit to the end of the backward pass."""
        assert self._end is not None
        *_, (_, began) = self._events.values()
        torch.cuda.synchronize()
        return float(began.elapsed_time(self._end)) / 1e3

    def seconds(self) -> dict[int, float]:
        """Returns the seconds from the start of each unit to the wait of the next; the last unit has none."""
        torch.cuda.synchronize()
        events = list(self._events.items())
        following = [came for _, (came, _) in events[1:]]
        return {n: began.elapsed_time(end) / 1e3 for (n, (_, began)), end in zip(events, following, strict=False)}


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
