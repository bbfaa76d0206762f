"""The GPU's update: one Triton kernel for all parameters of a unit, or the operations of arithmetic.py one by one.

A launch takes a table with a row of addresses and factors for each parameter. It is filled while the GPU is still at
the backward pass; when the norm of all gradients is known, the launch with their scale is all that is left to do.
Triton would contract a product and a sum into one operation and round a division loosely; both are asked not to.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy
import torch
from torch import Tensor

from pipedejavu.hybrid.arithmetic import AdamState, Scalars
from pipedejavu.runtime.host_memory import aligned

BLOCK = 1024
_GRADIENT, _WEIGHT, _REST, _COUNT, _FIRST, _FACTORS, _WIDTH = 0, 1, slice(2, 5), 5, 6, 7, 12
"""Columns: addresses of gradient, weight, low half and moments; elements; first block; factors but the scale."""
_FEWEST_ROWS = 16
_NOBODY, _NOTHING = 2**62, Scalars(*[0.0] * len(Scalars._fields))[1:]
_EVEN = 16
"""Bytes and elements: addresses and sizes that are multiples of it let the kernel read many elements at once."""

Places = tuple[int, int, int]
"""Of the low half and both moments: addresses, or bytes from where all of it begins."""

Launch = Callable[[float], None]
"""An update that only waits for the scale of its gradients, which it keeps alive."""


def state_layout(weight: Tensor) -> tuple[Places, int]:
    """Returns where the parts of a parameter's state lie where they lie together, and the size of all of it."""
    n = weight.numel()
    low, moment = aligned(2 * n) if weight.dtype == torch.bfloat16 else 0, aligned(4 * n)
    return (0, low, low + moment), low + 2 * moment


def state_in(memory: Tensor, weight: Tensor, start: int) -> AdamState:
    """Returns a parameter's state that begins somewhere in memory."""
    n, (low, m, v) = weight.numel(), (start + place for place in state_layout(weight)[0])
    half = memory[low : low + 2 * n].view(torch.int16) if weight.dtype == torch.bfloat16 else None
    return AdamState(weight.view(-1), half, *(memory[place : place + 4 * n].view(torch.float32) for place in (m, v)))


def addresses_of(state: AdamState) -> Places:
    """Returns where the parts of a state are."""
    low, m, v = (0 if part is None else part.data_ptr() for part in state[1:])
    return low, m, v


class UnitUpdate:
    """The update of one unit's parameters, on the current stream of their device."""

    def __init__(self, weights: Sequence[Tensor], places: Sequence[Places]):
        kinds = {weight.dtype: [n for n, w in enumerate(weights) if w.dtype == weight.dtype] for weight in weights}
        self._tables = [_Table([weights[n] for n in own], [places[n] for n in own], own) for own in kinds.values()]

    def prepare(self, factors: Sequence[Scalars | None], gradients: Sequence[Tensor | None], base: int = 0) -> Launch:
        """Returns the update of the parameters that have factors; places count from `base`.

        What was prepared before must have come to the GPU by now, as it has when the host has waited for a norm since.
        """
        launches = [table.prepare(factors, gradients, base) for table in self._tables]

        def launch(scale: float) -> None:
            for each in launches:
                each(scale)

        return launch


class _Table:
    """The parameters of a unit that have one dtype."""

    def __init__(self, weights: Sequence[Tensor], places: Sequence[Places], own: Sequence[int]):
        self.weights, self.own = weights, own
        self.places, self.counts = numpy.array(places), [weight.numel() for weight in weights]
        blocks = numpy.cumsum([0, *(-(-count // BLOCK) for count in self.counts)])
        self.num_blocks = int(blocks[-1])
        shape = max(_FEWEST_ROWS, 1 << (len(weights) - 1).bit_length()), _WIDTH
        self.here = torch.zeros(shape, dtype=torch.int64, pin_memory=True)
        self.there = torch.empty(shape, dtype=torch.int64, device=weights[0].device)
        rows = self.here.numpy()
        rows[:, _FIRST] = _NOBODY
        rows[: len(weights), _FIRST] = blocks[:-1]
        self.used = rows[: len(weights)]
        self.factors = self.used[:, _FACTORS:].view(numpy.float32)[:, : len(_NOTHING)]

    def prepare(self, factors: Sequence[Scalars | None], gradients: Sequence[Tensor | None], base: int) -> Launch:
        found = [(factors[n], gradients[n]) for n in self.own]
        given = [None if s is None or g is None else g.contiguous() for s, g in found]
        self.used[:, _GRADIENT] = [0 if g is None else g.data_ptr() for g in given]
        self.used[:, _WEIGHT] = [weight.data_ptr() for weight in self.weights]
        self.used[:, _REST] = self.places + base
        self.used[:, _COUNT] = [0 if g is None else n for n, g in zip(self.counts, given, strict=True)]
        self.factors[:] = [_NOTHING if s is None else s[1:] for s, _ in found]
        self.there.copy_(self.here, non_blocking=True)
        return partial(self._launch, given)

    def _launch(self, given: Sequence[Tensor | None], scale: float) -> None:
        if not self.num_blocks or all(gradient is None for gradient in given):
            return
        is_even = int(numpy.bitwise_or.reduce(self.used[:, : _COUNT + 1], axis=None)) % _EVEN == 0
        _kernel()[(self.num_blocks,)](
            self.there, scale, is_split=self.weights[0].dtype == torch.bfloat16, is_even=is_even,
            most=len(self.there), width=_WIDTH, block=BLOCK, enable_fp_fusion=False,
        )  # fmt: skip


def has_kernel(device: torch.device) -> bool:
    """Whether there is a kernel for a device; without, the operations run one by one."""
    return device.type == "cuda" and _kernel() is not None


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
