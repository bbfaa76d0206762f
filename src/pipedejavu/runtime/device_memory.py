"""The memory of a GPU as torch's caching allocator sees it: what it may reserve, holds, and may be held to.

    reserved    bytes that the allocator has taken from the device, which no other process can have
    allocated   bytes of them that tensors use
    limit       bytes that it may reserve: what is free on the device, and the process's fraction of it

On a CPU all but the limit are zero.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pipedejavu.runtime.host_limit import free_host_bytes

_EXPANDABLE = "expandable_segments"
_applied: list[str] = []
"""The settings that were applied last, for versions of torch that do not return them."""


class DeviceMemory:
    """The memory of one device, of which this process may take a part."""

    def __init__(self, device: torch.device):
        self.is_gpu = device.type == "cuda"
        if self.is_gpu and device.index is None:  # torch's limits are asked for by index
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device

    def allocated_bytes(self) -> int:
        """Returns the bytes of all tensors."""
        return torch.cuda.memory_allocated(self.device) if self.is_gpu else 0

    def reserved_bytes(self) -> int:
        """Returns the bytes that the allocator has taken from the device."""
        return torch.cuda.memory_reserved(self.device) if self.is_gpu else 0

    def peak_bytes(self) -> int:
        """Returns the peak of the allocated bytes since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self.device) if self.is_gpu else 0

    def reset_peak(self) -> None:
        """Starts a new peak at the present bytes."""
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)

    def release(self) -> None:
        """Returns memory that no tensor uses to the device."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def limit_bytes(self) -> int:
        """Returns the bytes that the allocator may reserve at most, with those that it has reserved."""
        if not self.is_gpu:
            return free_host_bytes()
        free, total = torch.cuda.mem_get_info(self.device)
        fraction = torch.cuda.get_per_process_memory_fraction(self.device)
        return min(free + self.reserved_bytes(), int(fraction * total))

    def free_bytes(self) -> int:
        """Returns the bytes that new tensors may take at most."""
        return self.limit_bytes() - self.allocated_bytes()

    def cap(self, size_bytes: int) -> Callable[[], None]:
        """Makes the allocator reserve at most `size_bytes`; returns a call that restores its limit.

        Before it would exceed them it returns unused memory to the device; if that is not enough, it raises
        torch.OutOfMemoryError, as on a device of that size.
        """
        if not self.is_gpu:
            return lambda: None
        before = torch.cuda.get_per_process_memory_fraction(self.device)
        total = torch.cuda.mem_get_info(self.device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, size_bytes / total), self.device)
        return lambda: torch.cuda.set_per_process_memory_fraction(before, self.device)


def use_expandable_segments() -> bool:
    """Makes torch's allocator grow segments page by page, which fragment little; returns whether it does.

    Settings of the user are kept: a choice that names expandable segments, and another backend, which has none. Memory
    that was allocated before stays where it is. Memory for CUDA IPC must not be expandable: allocate it within
    `fixed_segments`.
    """
    settings = allocator_settings()
    chosen = dict(pair.strip().partition(":")[::2] for pair in settings.split(",") if pair.strip())
    if _EXPANDABLE in chosen:
        return chosen[_EXPANDABLE].strip().lower() == "true"
    if sys.platform != "linux" or chosen.get("backend", "native").strip() != "native":
        return False
    _set(settings, is_expandable=True)
    return True


@contextmanager
def fixed_segments() -> Iterator[None]:
    """A context in which new memory comes from segments of fixed size, which other processes can map."""
    settings = allocator_settings()
    pairs = [pair for pair in settings.split(",") if pair.strip() and not pair.strip().startswith(_EXPANDABLE)]
    if len(pairs) == len([pair for pair in settings.split(",") if pair.strip()]):
        yield
        return
    _set(",".join(pairs), is_expandable=False)
    try:
        yield
    finally:
        _apply(settings)


def allocator_settings() -> str:
    """Returns the settings of torch's allocator that were given last, by the environment or by a call."""
    read: Callable[[], Any] | None = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    settings = str(read() or "") if read is not None else (_applied[-1:] or [""])[0]
    environment = (os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return settings or next((value for value in environment if value), "")


def _set(settings: str, *, is_expandable: bool) -> None:
    """Applies settings with one choice added; a call resets what it does not name, so all are given again."""
    _apply(",".join(part for part in (settings, f"{_EXPANDABLE}:{is_expandable}") if part))


def _apply(settings: str) -> None:
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    before = {device: torch.cuda.get_per_process_memory_fraction(device) for device in devices}
    apply = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    apply(settings)
    _applied[:] = [settings]
    for device, fraction in before.items():  # settings can name one, which a later call may have replaced
        if torch.cuda.get_per_process_memory_fraction(device) != fraction:
            torch.cuda.set_per_process_memory_fraction(fraction, device)
