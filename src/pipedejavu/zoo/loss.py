"""Losses as sums over samples or valid tokens, and the count that the caller divides by once (rule G1)."""

import torch
from torch import Tensor
from torch.nn import functional

from pipedejavu.zoo.chain import Flow

IGNORED = -100
"""Value of a target that does not count."""


def cross_entropy(output: Flow, target: Tensor) -> Tensor:
    """Returns the sum over all targets that count, in float32 or higher precision."""
    assert isinstance(output, Tensor)
    logits = output.to(torch.promote_types(output.dtype, torch.float32))
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten(), ignore_index=IGNORED, reduction="sum")


def balanced_cross_entropy(output: Flow, target: Tensor, *, coefficient: float) -> Tensor:
    """Adds each sample's balance loss, once per target that counts; the output is (logits, balance)."""
    logits, balance = output
    return cross_entropy(logits, target) + coefficient * (balance * (target != IGNORED).sum(dim=1)).sum()


def count(target: Tensor) -> int:
    """Returns the number of targets that count."""
    return int((target != IGNORED).sum())
