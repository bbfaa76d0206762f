"""The update on the GPU: one Triton kernel for all parameters of a unit, or the operations of arithmetic.py.

A launch reads a table that has one row of addresses and factors per parameter. The table is filled while the GPU still
runs the backward pass; when the norm of all gradients is known, only the launch with their scale is left. The kernel
is compiled without fused multiply-add and with exact division, so that its bits equal those of arithmetic.py.
"""

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any

import numpy
import torch
from torch import Tensor

from pipedejavu.optim.arithmetic import AdamState, Scalars, update_
from pipedejavu.optim.moment_format import MOMENT_FORMATS, SCALE_BLOCK, MomentFormat
from pipedejavu.optim.native import NativeTask, flattened
from pipedejavu.optim.state_parts import state_from, state_parts
from pipedejavu.runtime.host_memory import aligned

BLOCK = 1024
_GRADIENT, _WEIGHT, _REST, _COUNT, _FIRST, _FACTORS, _OUT, _SEED, _WIDTH = 0, 1, slice(2, 7), 7, 8, 9, 13, 14, 15
"""Columns: addresses of gradient, weight, low half, moments and their scales; number of elements; first block; factors
but scale; address of the new weight; seed."""
_FEWEST_ROWS = 16
_NO_BLOCK, _NO_FACTORS = 2**62, (0.0,) * 8
_MOMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""The numbers of the formats of moments in the kernel, by the dtype of the first."""
_ALIGNED = [_GRADIENT, _WEIGHT, *range(2, 5), _COUNT]
_EVEN = 16
"""If all addresses (in bytes) and sizes (in elements) are multiples of this, the kernel uses vector loads."""

StateOffsets = tuple[int, int, int, int, int]
"""Low half, both moments and their scales: their addresses, or their offsets in bytes from a base address."""

_launching = threading.Lock()
"""Workers of one process launch one at a time: the first launch of each kind compiles the kernel."""

Launch = Callable[[float], None]
"""A prepared update, called with the scale of the gradients; it keeps the gradients alive."""


def state_layout(weight: Tensor, moments: MomentFormat = "fp32") -> tuple[StateOffsets, int]:
    """Returns the offsets of a parameter's state in contiguous memory, and its total size in bytes."""
    sizes = [aligned(dtype.itemsize * count) for dtype, count in state_parts(weight, moments)]
    *starts, size = accumulate(sizes, initial=0)
    low, m, v, *scales = starts if weight.dtype == torch.bfloat16 else (0, *starts)
    m_scale, v_scale = scales or (0, 0)
    return (low, m, v, m_scale, v_scale), size


def state_in(memory: Tensor, weight: Tensor, start: int, moments: MomentFormat = "fp32") -> AdamState:
    """Returns the state of a parameter as views of memory, from byte `start` on."""

    def take(count: int, dtype: torch.dtype) -> Tensor:
        nonlocal start
        view = memory[start : start + count * dtype.itemsize].view(dtype)
        start += aligned(count * dtype.itemsize)
        return view

    return state_from(weight.view(-1), moments, take)


def addresses_of(state: AdamState) -> StateOffsets:
    """Returns the addresses of the parts of a state."""
    low, m, v, m_scale, v_scale = (0 if part is None else part.data_ptr() for part in state[1:])
    return low, m, v, m_scale, v_scale


class UnitUpdate:
    """The update of the parameters of one unit, on the current stream of their device."""

    def __init__(self, weights: Sequence[Tensor], offsets: Sequence[StateOffsets], moments: MomentFormat = "fp32"):
        by_dtype = {weight.dtype: [n for n, w in enumerate(weights) if w.dtype == weight.dtype] for weight in weights}
        self._tables = [
            _Table([weights[n] for n in indices], [offsets[n] for n in indices], indices, MOMENT_FORMATS.index(moments))
            for indices in by_dtype.values()
        ]

    def prepare(self, factors: Sequence[Scalars | None], gradients: Sequence[Tensor | None], base: int = 0) -> Launch:
        """Returns a function that launches the update of the parameters that have factors.

        Offsets of the state are relative to `base`. The GPU must have read the previous table, so
        call it again only after the host has waited for a later norm.
        """
        launches = [table.prepare(factors, gradients, base) for table in self._tables]

        def launch(scale: float) -> None:
            for each in launches:
                each(scale)

        return launch


class _Table:
    """The table of a unit's parameters of one dtype."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        offsets: Sequence[StateOffsets],
        indices: Sequence[int],
        moments: int,
        out: Sequence[Tensor] | None = None,
    ):
        """The new weights are written to `out`, by default to the weights."""
        self.moments = moments
        self.weights, self.indices, self.out = weights, indices, weights if out is None else out
        self.offsets, self.counts = numpy.array(offsets), [weight.numel() for weight in weights]
        blocks = numpy.cumsum([0, *(-(-count // BLOCK) for count in self.counts)])
        self.num_blocks = int(blocks[-1])
        shape = max(_FEWEST_ROWS, 1 << (len(weights) - 1).bit_length()), _WIDTH
        self.on_host = torch.zeros(shape, dtype=torch.int64, pin_memory=True)
        self.on_gpu = torch.empty(shape, dtype=torch.int64, device=weights[0].device)
        rows = self.on_host.numpy()
        rows[:, _FIRST] = _NO_BLOCK
        rows[: len(weights), _FIRST] = blocks[:-1]
        self.used = rows[: len(weights)]
        self.factors = self.used[:, _FACTORS:].view(numpy.float32)[:, : len(_NO_FACTORS)]

    def prepare(self, factors: Sequence[Scalars | None], gradients: Sequence[Tensor | None], base: int) -> Launch:
        pairs = [(factors[n], gradients[n]) for n in self.indices]
        dense = [None if s is None or g is None else g.contiguous() for s, g in pairs]
        self.used[:, _GRADIENT] = [0 if g is None else g.data_ptr() for g in dense]
        self.used[:, _WEIGHT] = [weight.data_ptr() for weight in self.weights]
        self.used[:, _OUT] = [weight.data_ptr() for weight in self.out]
        self.used[:, _REST] = self.offsets + base
        self.used[:, _COUNT] = [0 if g is None else n for n, g in zip(self.counts, dense, strict=True)]
        self.factors[:] = [_NO_FACTORS if s is None else s[1:-1] for s, _ in pairs]
        self.used[:, _SEED] = [0 if s is None else s.seed for s, _ in pairs]
        self.on_gpu.copy_(self.on_host, non_blocking=True)
        return partial(self._launch, dense)

    def _launch(self, gradients: Sequence[Tensor | None], scale: float) -> None:
        if not self.num_blocks or all(gradient is None for gradient in gradients):
            return
        read = numpy.bitwise_or.reduce(self.used[:, _ALIGNED], axis=None)
        is_even = int(read | numpy.bitwise_or.reduce(self.used[:, _OUT])) % _EVEN == 0
        is_wide = any(gradient is not None and gradient.dtype == torch.float32 for gradient in gradients)
        with _launching:
            self._run(scale, is_wide=is_wide, is_even=is_even)

    def _run(self, scale: float, *, is_wide: bool, is_even: bool) -> None:
        _kernel()[(self.num_blocks,)](
            self.on_gpu, scale, is_split=self.weights[0].dtype == torch.bfloat16, is_wide=is_wide,
            is_even=is_even, moments=self.moments, most=len(self.on_gpu), width=_WIDTH, block=BLOCK,
            scale_block=SCALE_BLOCK, enable_fp_fusion=False,
        )  # fmt: skip


def update_on_gpu(tasks: Sequence[NativeTask]) -> None:
    """Updates parameters on the current stream of their GPU, with the same factor of the gradients for all of them."""
    groups: dict[tuple[torch.dtype, torch.dtype, torch.dtype], list[NativeTask]] = {}
    for task in tasks:
        view = flattened(task)
        if view is None:
            update_(*task)
        else:
            groups.setdefault((view.old.weight.dtype, view.gradient.dtype, view.old.m.dtype), []).append(view)
    for (_, _, moment), group in groups.items():
        assert all(task.s.scale == group[0].s.scale for task in group)
        states = [task.old for task in group]
        # A table of its own for each pass: the allocator of pinned memory waits for the copy before it gives it again.
        table = _Table(
            [state.weight for state in states],
            [addresses_of(state) for state in states],
            range(len(group)),
            _MOMENTS[moment],
            [task.new.weight for task in group],
        )
        table.prepare([task.s for task in group], [task.gradient for task in group], 0)(group[0].s.scale)


def has_kernel(device: torch.device) -> bool:
    """Returns whether the Triton kernel can be used on a device; otherwise the operations run one by one."""
    return device.type == "cuda" and _kernel() is not None


@cache
def _kernel() -> Any:
    """Returns the kernel, or None if Triton or CUDA is missing."""
    if not torch.cuda.is_available():
        return None
    try:
        from pipedejavu.optim.kernel import adamw
    except ImportError:
        return None
    return adamw
