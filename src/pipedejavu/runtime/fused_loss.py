"""The cross-entropy of 16-bit logits whose gradient takes the memory of the logits.

Nothing but the logits exists per class: the loss is computed in float32 within each row, by one kernel on a GPU and by
operations of torch elsewhere. Class weights and smoothed labels are left to torch's own loss.
"""

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

Pointwise = Sequence[Callable[[Tensor], Tensor]]
"""The operations between a head and its loss; each maps every logit on its own."""

BLOCK = 4096
"""Classes that a program of the kernel has in registers."""


def can_fuse(dtype: torch.dtype, *, is_plain: bool, pointwise: Pointwise) -> bool:
    """Returns whether the loss of logits of this dtype can be fused.

    `is_plain` says that the loss has neither class weights nor smoothed labels; `pointwise`, which lies between logits
    and loss, may only cast.
    """
    return is_plain and dtype in (torch.bfloat16, torch.float16) and _only_casts(pointwise, dtype)


def apply_all(pointwise: Pointwise, logits: Tensor) -> Tensor:
    """Returns what the operations make of logits."""
    for operation in pointwise:
        logits = operation(logits)
    return logits


def _only_casts(pointwise: Pointwise, dtype: torch.dtype) -> bool:
    probe = torch.linspace(-1000, 1000, 257).to(dtype).view(1, -1)
    result = apply_all(pointwise, probe)
    return result.dtype.itemsize >= dtype.itemsize and torch.equal(result.float(), probe.float())


def fused_loss_(logits: Tensor, targets: Tensor, scales: Tensor | None, ignore_index: int) -> Tensor:
    """Returns the loss of each row in float32, and overwrites the logits with its gradient times the row's scale.

    Without scales the logits are left as they are.
    """
    if logits.is_cuda and _has_triton():
        return _by_kernel(logits, targets, scales, ignore_index)
    wide, counts = logits.float(), targets != ignore_index
    rows = torch.arange(len(targets), device=targets.device)
    classes = targets.masked_fill(~counts, 0)
    log_sum = torch.logsumexp(wide, dim=1)
    losses = (log_sum - wide[rows, classes]).masked_fill(~counts, 0.0)
    if scales is not None:
        gradient = wide.sub_(log_sum[:, None]).exp_()
        gradient[rows, classes] -= 1.0
        logits.copy_(gradient.mul_(scales[:, None]).masked_fill_(~counts[:, None], 0.0))
    return losses


def _by_kernel(logits: Tensor, targets: Tensor, scales: Tensor | None, ignore_index: int) -> Tensor:
    from pipedejavu.runtime.loss_kernel import cross_entropy

    assert logits.stride(1) == 1
    losses = torch.empty(len(targets), dtype=torch.float32, device=logits.device)
    with torch.cuda.device(logits.device):
        cross_entropy[(len(targets),)](
            logits, targets, losses if scales is None else scales, losses, logits.stride(0), logits.shape[1],
            ignore_index, block=BLOCK, has_gradient=scales is not None, num_warps=8,
        )  # fmt: skip
    return losses


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
