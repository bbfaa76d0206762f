"""Host memory for copies to and from a GPU: pinned, and of exactly the size that is needed.

torch rounds pinned memory up to a power of two. A `Slab` maps its pages itself, touches them on all threads, unless
`host_pages` did before, and registers them with CUDA. Its mapping is private, because Linux gives huge pages to shared
ones only if the system's administrator allows it, and an update of the state in small pages waits for address
translation. Forked processes, such as the workers of a `DataLoader`, do not get the mapping: they would copy each page
that the parent writes.
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from pipedejavu.runtime.host_pages import map_pages, take_warm

ALIGN_BYTES = 64
CPU = torch.device("cpu")

Progress = Callable[[int], None]
"""Receives the number of bytes that were made ready."""


class Slab:
    """One stretch of host memory, from which tensors are taken one after the other."""

    def __init__(
        self, size_bytes: int, zero: Callable[[int, int, Progress], None], *, is_pinned: bool, progress: Progress
    ):
        """Takes memory that is mapped already, or lets `zero`, which takes address, size and progress, map it."""
        self.size_bytes, self._used = size_bytes, 0
        warm = take_warm(size_bytes, progress) if size_bytes else None
        self._pages, self._start = warm or (map_pages(max(size_bytes, 1)), 0)
        self.whole = torch.frombuffer(self._pages, dtype=torch.uint8, count=max(size_bytes, 1), offset=self._start)
        self.whole = self.whole[:size_bytes]
        address = self.whole.data_ptr()
        if warm is None:
            zero(address, size_bytes, progress)
        if is_pinned and size_bytes:
            error = torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0)  # type: ignore[no-untyped-call]
            if int(error) != 0:
                raise MemoryError(f"CUDA could not pin {size_bytes:,} bytes of host memory (error {int(error)})")
            weakref.finalize(self, _unregister, address, self.whole)

    def rewind(self) -> None:
        """Makes the next tensor start at the beginning again."""
        self._used = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns the next tensor of the slab, one-dimensional and at first zero; `torch.save` writes it alone."""
        start, size = self._start + self._used, numel * dtype.itemsize
        self._used += aligned(size)
        assert self._used <= self.size_bytes, "the slab is too small"
        return (
            torch.frombuffer(self._pages, dtype=dtype, count=numel, offset=start) if numel else torch.empty(0).to(dtype)
        )


def aligned(size_bytes: int) -> int:
    """Returns the bytes that a tensor takes in a slab."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _unregister(address: int, memory: Tensor) -> None:
    """Unpins memory, which `memory` keeps mapped until then."""
    del memory
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def move_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a detached tensor on a device; from a GPU to the host it is copied into pinned memory.

    The copy is issued to the current stream; the host does not wait for it.
    """
    tensor = tensor.detach()
    if tensor.is_cuda and device == CPU:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    return tensor.to(device, non_blocking=True)
