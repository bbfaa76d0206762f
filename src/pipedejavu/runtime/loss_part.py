"""One rank's part of embeddings and losses: of their vocabulary, or of their tokens.

No rank ever has the logits of the whole vocabulary. Per token, the ranks exchange the largest logit of each, and sum
three numbers: the exponentials, the logit of the target, and, for label smoothing, all logits.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipedejavu.runtime import tensor_group
from pipedejavu.runtime.graph_step import Step
from pipedejavu.runtime.tensor_group import TensorGroup

NONE, MEAN, SUM = range(3)
"""Reductions of a loss, by their numbers in ATen."""


class VocabularyRows(Step):
    """Rows of an embedding, of which each rank has some consecutive ones."""

    def forward(self, weight: Tensor, indices: Tensor) -> Tensor:
        """Returns the rows that this rank has, and zeros for those of other ranks."""
        size = len(weight)
        local, padding = indices - size * self.group.rank, self.facts["padding"] - size * self.group.rank
        is_here = (local >= 0) & (local < size)
        rows = functional.embedding(local.clamp(0, size - 1), weight, padding if 0 <= padding < size else None)
        return rows.masked_fill(~is_here[..., None], 0.0)


class SummedLoss(Step):
    """A cross-entropy of some tokens, summed over the ranks."""

    def forward(self, logits: Tensor, target: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
        """Returns the loss of all tokens; `targets` are those of all ranks."""
        facts = self.facts
        kept = {name: facts[name] for name in ("ignore_index", "label_smoothing")}
        total = functional.cross_entropy(logits, target, weight, reduction="sum", **kept)
        total = tensor_group.sum_forward(total, self.group)
        return total if facts["reduction"] == SUM else total / _divisor(targets, weight, facts["ignore_index"], total)


class VocabularyLoss(Step):
    """A cross-entropy of logits of which each rank has those of some classes."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss; the same on all ranks."""
        facts = self.facts
        rows, flat = logits.movedim(1, -1).reshape(-1, logits.shape[1]), targets.reshape(-1)
        is_counted = flat != facts["ignore_index"]
        if rows.itemsize < 4 and torch.is_autocast_enabled(rows.device.type):
            rows = rows.float()  # as autocast does for a cross-entropy
        losses: Tensor = _ClassLosses.apply(  # type: ignore[no-untyped-call]
            rows, flat, is_counted, facts["label_smoothing"], self.group
        )
        if facts["reduction"] == NONE:
            return losses.view(targets.shape)
        total = losses.sum()
        return total if facts["reduction"] == SUM else total / is_counted.sum().to(total.dtype)


def _divisor(targets: Tensor, weight: Tensor | None, ignored: int, like: Tensor) -> Tensor:
    """Returns what the mean divides by: the targets that count, or the weights of their classes."""
    is_counted = targets != ignored
    if weight is None:
        return is_counted.sum().to(like.dtype)
    total: Tensor = (weight[targets.clamp_min(0)] * is_counted).sum().detach()
    return total


class _ClassLosses(torch.autograd.Function):
    """The loss per token; keeps the softmax of this rank's classes for the backward."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, is_counted: Tensor, smoothing: float, group: TensorGroup
    ) -> Tensor:
        width = logits.shape[1]
        local = targets - width * group.rank
        is_here = is_counted & (local >= 0) & (local < width)
        local = local.clamp(0, width - 1)
        most = torch.stack(group.all_gather(logits.amax(1))).amax(0)
        shifted = logits - most[:, None]
        picked = shifted.gather(1, local[:, None])[:, 0].masked_fill(~is_here, 0.0)
        every = shifted.sum(1) if smoothing else torch.zeros_like(picked)
        shares = shifted.exp_()
        total, picked, every = group.all_reduce(torch.stack((shares.sum(1), picked, every)))
        shares /= total[:, None]
        ctx.save_for_backward(shares, local, is_here, is_counted)
        ctx.smoothing, ctx.num_classes = smoothing, width * group.size
        losses: Tensor = total.log() - (1 - smoothing) * picked - smoothing / ctx.num_classes * every
        return losses.masked_fill(~is_counted, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        shares, local, is_here, is_counted = ctx.saved_tensors
        gradient = shares - ctx.smoothing / ctx.num_classes
        gradient.scatter_add_(1, local[:, None], -(1 - ctx.smoothing) * is_here[:, None].to(gradient.dtype))
        return gradient * (gradients[0] * is_counted)[:, None], None, None, None, None
