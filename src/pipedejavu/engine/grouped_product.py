"""Grouped products in float64, which torch has for fewer bits only: a replay in float64 of a model with experts."""

from itertools import pairwise

import torch
from torch import Tensor


def is_grouped_product(func: object) -> bool:
    """Whether an operation multiplies groups of rows or columns, each with a matrix of its own."""
    return func is torch.ops.aten._grouped_mm.default


def grouped_product(left: Tensor, right: Tensor, ends: Tensor | None = None, *_: object, **__: object) -> Tensor:
    """Returns the products of the groups that end at `ends`: of rows of `left`, columns of `right`, or what is summed.

    Rows or columns after the last end are zeros.
    """
    if ends is None:
        return left @ right
    groups = list(enumerate(pairwise([0, *ends.tolist()])))
    if left.dim() == right.dim() == 2:
        return torch.stack([left[:, a:b] @ right[a:b] for _, (a, b) in groups])
    result = left.new_zeros(left.shape[-2], right.shape[-1])
    for n, (a, b) in groups:
        if left.dim() == 2:
            result[a:b] = left[a:b] @ right[n]
        else:
            result[:, a:b] = left[n] @ right[:, a:b]
    return result
