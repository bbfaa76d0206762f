"""The GPU's update: one Triton kernel for all parameters of a unit, or the operations of arithmetic.py one by one.

A launch takes a table of addresses and factors, a row for each parameter: the host is busy with it for as long as a
kernel of a single parameter would keep it. Triton would contract a product and a sum into one operation and round a
division loosely; both are asked not to.
"""

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipedejavu.hybrid.arithmetic import Scalars, State, update_
from pipedejavu.hybrid.slab import aligned

BLOCK = 1024
_FEWEST_ROWS = 16
_ROW = struct.Struct("7q9f4x")
"""Addresses of gradient, weight, low half and both moments; the number of elements; the first block; factors."""
_NOBODY = _ROW.pack(0, 0, 0, 0, 0, 0, 2**62, *[0.0] * 9)
_EVEN = 16
"""Bytes and elements: addresses and sizes that are multiples of it let the kernel read many elements at once."""


class Visiting(NamedTuple):
    """The state of a parameter that begins somewhere in memory that holds more; its tensors are not made yet."""

    memory: Tensor
    start: int


class GpuTask(NamedTuple):
    """One parameter's update, in place."""

    s: Scalars
    gradient: Tensor
    weight: Tensor
    rest: State | Visiting


def resting_bytes(weight: Tensor) -> int:
    """Returns the bytes of a parameter's state beside its weight: the low half of a split master, and moments."""
    return _places(weight)[-1]


def _places(weight: Tensor) -> tuple[int, int, int, int]:
    """Returns where the low half, both moments and the end of a parameter's state lie, from its start."""
    n = weight.numel()
    low, moment = aligned(2 * n) if weight.dtype == torch.bfloat16 else 0, aligned(4 * n)
    return 0, low, low + moment, low + 2 * moment


def update_on_gpu(tasks: Sequence[GpuTask]) -> None:
    """Updates parameters on the current stream of their device."""
    if _kernel() is None:
        for task in tasks:
            state = _state(task)
            update_(task.s, task.gradient.reshape(-1), state, state)
        return
    for dtype in dict.fromkeys(task.weight.dtype for task in tasks):
        _launch([task for task in tasks if task.weight.dtype == dtype], is_split=dtype == torch.bfloat16)


def _state(task: GpuTask) -> State:
    if isinstance(task.rest, State):
        return task.rest
    weight, (memory, start), n = task.weight, task.rest, task.weight.numel()
    low, m, v, _ = (start + place for place in _places(weight))
    halves = memory[low : low + 2 * n].view(torch.int16) if weight.dtype == torch.bfloat16 else None
    moments = (memory[place : place + 4 * n].view(torch.float32) for place in (m, v))
    return State(weight.view(-1), halves, *moments)


def _addresses(task: GpuTask) -> tuple[int, ...]:
    """Returns where low half and moments are, without making tensors of them."""
    if isinstance(task.rest, State):
        return tuple(0 if tensor is None else tensor.data_ptr() for tensor in task.rest[1:])
    begin = task.rest.memory.data_ptr() + task.rest.start
    return tuple(begin + place for place in _places(task.weight)[:3])


def _launch(tasks: Sequence[GpuTask], *, is_split: bool) -> None:
    gradients = [task.gradient.contiguous() for task in tasks]  # those that were made for this live until the launch
    rows, block, bits = [], 0, 0
    for task, gradient in zip(tasks, gradients, strict=True):
        n = task.weight.numel()
        addresses = gradient.data_ptr(), task.weight.data_ptr(), *_addresses(task)
        rows.append(_ROW.pack(*addresses, n, block, *task.s))
        block += -(-n // BLOCK)
        for number in (*addresses, n):
            bits |= number
    if not block:
        return
    most = max(_FEWEST_ROWS, 1 << (len(rows) - 1).bit_length())
    rows += [_NOBODY] * (most - len(rows))
    table = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.int64).pin_memory()
    _kernel()[(block,)](
        table.to(gradients[0].device, non_blocking=True),
        is_split=is_split, is_even=bits % _EVEN == 0, most=most, width=_ROW.size // 8, block=BLOCK,
        enable_fp_fusion=False,
    )  # fmt: skip


@cache
def _kernel() -> Any:
    """Returns the kernel, or None where Triton is missing."""
    if not torch.cuda.is_available():
        return None
    try:
        from pipedejavu.hybrid.kernel import adamw
    except ImportError:
        return None
    return adamw
