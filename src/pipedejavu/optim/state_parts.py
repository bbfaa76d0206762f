"""The tensors of a parameter's state: the low half of a split master, and both moments."""

from collections.abc import Callable

import torch
from torch import Tensor

from pipedejavu.optim.arithmetic import AdamState
from pipedejavu.optim.moment_format import MomentFormat, moment_parts


def state_parts(weight: Tensor, moments: MomentFormat) -> list[tuple[torch.dtype, int]]:
    """Returns dtype and number of elements of each tensor of a parameter's state: the low half first, if it has one."""
    low = [(torch.int16, weight.numel())] if weight.dtype == torch.bfloat16 else []
    return [*low, *moment_parts(moments, weight.numel())]


def state_from(weight: Tensor, moments: MomentFormat, take: Callable[[int, torch.dtype], Tensor]) -> AdamState:
    """Returns the state of a parameter, with tensors that `take` gives one after the other."""
    taken = [take(count, dtype) for dtype, count in state_parts(weight, moments)]
    low = taken.pop(0) if weight.dtype == torch.bfloat16 else None
    return AdamState(weight, low, *taken)
