"""The GPU's update: one Triton kernel with the operations of arithmetic.py, or those operations one by one.

Triton would contract a product and a sum into one operation and round a division loosely; both are asked not to.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from pipedejavu.hybrid.arithmetic import Scalars, State, update_

BLOCK = 1024


def update_on_gpu(s: Scalars, gradient: Tensor, state: State) -> None:
    """Updates a parameter's state in place, on the current stream of its device."""
    kernel = _kernel()
    if kernel is None:
        update_(s, gradient, state, state)
        return
    n = gradient.numel()
    low = state.m if state.low is None else state.low
    kernel[((n + BLOCK - 1) // BLOCK,)](
        gradient, state.weight, low, state.m, state.v, n, *s,
        is_split=state.low is not None, block=BLOCK, enable_fp_fusion=False,
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
