"""Host memory of exact size, for state and for copies to and from a GPU.

torch's own pinned memory is rounded up to a power of two; here pages are mapped, written once on all threads, and
what a GPU copies from or to is registered with CUDA as it lies.
"""

import mmap
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from pipedejavu.hybrid.native import HostUpdate

ALIGN_BYTES = 64


class Slab:
    """One stretch of host memory, from which tensors are taken one after the other."""

    def __init__(self, size_bytes: int, host: HostUpdate, *, is_pinned: bool, progress: Callable[[int], None]):
        self.size_bytes, self._used = size_bytes, 0
        self._pages = mmap.mmap(-1, max(size_bytes, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        self.whole = torch.frombuffer(self._pages, dtype=torch.uint8)[:size_bytes]
        address = self.whole.data_ptr()
        host.zero(address, size_bytes, progress)
        if is_pinned and size_bytes:
            error = torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0)  # type: ignore[no-untyped-call]
            if int(error) != 0:
                raise MemoryError(f"CUDA could not pin {size_bytes:,} bytes of host memory (error {int(error)})")
            weakref.finalize(self, _unregister, address, self.whole)

    def rewind(self) -> None:
        """Lets tensors be taken from the beginning again."""
        self._used = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns the next tensor of the slab, one-dimensional, zero at first; torch.save takes it alone."""
        start, size = self._used, numel * dtype.itemsize
        self._used += aligned(size)
        assert self._used <= self.size_bytes, "the slab is too small"
        return (
            torch.frombuffer(self._pages, dtype=dtype, count=numel, offset=start) if numel else torch.empty(0).to(dtype)
        )


def aligned(size_bytes: int) -> int:
    """Returns the bytes that a tensor takes of a slab."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _unregister(address: int, memory: Tensor) -> None:
    """Releases pinned memory, which `memory` keeps mapped until then."""
    del memory
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
