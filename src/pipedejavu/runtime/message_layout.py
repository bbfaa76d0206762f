"""The layout of a message: the dtype, shape and offset of each of its tensors, and its form in bytes.

The form is fixed and checked when it is read: a faulty peer causes an error, not a tensor outside of its memory.
"""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipedejavu.facts import InputError

ALIGN_BYTES = 64
"""Each tensor of a message starts at a multiple of this."""
MOST_BYTES = 1 << 26
"""Limit on the form of a layout."""
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.uint16, torch.uint32,
    torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
"""The order is part of the form."""
_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
_TENSOR = struct.Struct("<BB")


class TensorLayout(NamedTuple):
    """One tensor of a message."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class MessageLayout(NamedTuple):
    """All tensors of a message, in order."""

    tensors: tuple[TensorLayout, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "MessageLayout":
        """Returns the layout of some tensors."""
        return cls(tuple(TensorLayout(t.dtype, tuple(t.shape)) for t in tensors))

    @property
    def size_bytes(self) -> int:
        """The bytes that the message takes in a slot."""
        return sum(_aligned(t.size_bytes) for t in self.tensors)

    def pack(self) -> bytes:
        """Returns the layout as bytes."""
        parts = list[bytes]()
        for dtype, shape in self.tensors:
            if dtype not in _NUMBERS:
                raise InputError(f"tensors of {dtype} do not pass between processes; use one of {_NAMES}")
            parts.append(_TENSOR.pack(_NUMBERS[dtype], len(shape)))
            parts.append(struct.pack(f"<{len(shape)}Q", *shape))
        return b"".join(parts)

    @classmethod
    def unpack(cls, data: bytes) -> "MessageLayout":
        """Reads what `pack` returns; raises ValueError for anything else."""
        tensors, position = list[TensorLayout](), 0
        try:
            while position < len(data):
                number, dims = _TENSOR.unpack_from(data, position)
                shape = struct.unpack_from(f"<{dims}Q", data, position + _TENSOR.size)
                position += _TENSOR.size + 8 * dims
                tensors.append(TensorLayout(DTYPES[number], shape))
        except (struct.error, IndexError) as error:
            raise ValueError(f"a peer sent a layout that cannot be read: {error}") from error
        return cls(tuple(tensors))

    def views(self, raw: Tensor) -> list[Tensor]:
        """Returns the tensors of the message as views of a slot's bytes."""
        if self.size_bytes > raw.numel():
            raise ValueError(f"a message of {self.size_bytes} bytes does not fit its slot of {raw.numel()} bytes")
        views, start = list[Tensor](), 0
        for layout in self.tensors:
            part = raw[start : start + layout.size_bytes]
            views.append(part.view(layout.dtype).view(layout.shape))
            start += _aligned(layout.size_bytes)
        return views


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
