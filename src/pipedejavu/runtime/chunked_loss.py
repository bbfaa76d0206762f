"""The cross-entropy of a linear head in chunks of tokens: the logits of all tokens never exist together.

For n chunks of N tokens, vocabulary V, width d, and b bytes per value of the head, the most that exists at a time is

    N/n · V · b        in a chunk whose loss is fused (`fused_loss`): its logits, and then their gradient
    V · d · (4 + b)    the sum of the chunks' weight gradients in float32, and one chunk's; on a GPU the sum alone
    N · d · b          the gradient of the hidden states

Otherwise a chunk takes `bytes_per_logit`: its logits, their log-probabilities, two gradients of these, and one of the
logits. A head in float32 or float64 adds a chunk's weight gradient to the sum in place. Early gradients are computed in
the forward, with one product per chunk less; until the backward they need V · d · b + N · d · b. Late ones are computed
in the backward from the logits, made again; until then only the hidden states are kept.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from pipedejavu.runtime.fused_loss import Pointwise, apply_all, can_fuse, fused_loss_


def bytes_per_logit(itemsize: int) -> int:
    """Returns the most bytes that exist at a time per logit, if the loss is not fused, of a head with this itemsize."""
    return 2 * itemsize + 12 if itemsize < 4 else 4 * itemsize


class LossSettings(NamedTuple):
    """The arguments of `torch.nn.functional.cross_entropy`, other than tensors of one entry per token."""

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0


class _ChunkedCall(NamedTuple):
    """One call of the chunked loss: all that is not a tensor."""

    pointwise: Pointwise
    settings: LossSettings
    num_chunks: int
    is_early: bool
    autocast: tuple[str, torch.dtype, bool]
    """The device type, dtype and state of autocast around the loss, which may run in float32 under it."""
    is_fused: bool


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weights: Tensor | None = None,
    *,
    num_chunks: int,
    settings: LossSettings = LossSettings(),  # noqa: B008 (a tuple)
    pointwise: Pointwise = (),
    is_early: bool = True,
) -> Tensor:
    """Returns the cross-entropy of `linear(hidden, weight, bias)`, after `pointwise`, with the class indices `targets`.

    `hidden` has the dtype of `weight` and one row per target. The result is that of `cross_entropy`: a number, or one
    per token with reduction "none". The gradient is early or late, as above; it is always late for float16, whose loss
    is scaled, and for losses per token.
    """
    kind = hidden.device.type
    is_early = is_early and torch.is_grad_enabled() and hidden.dtype != torch.float16 and settings.reduction != "none"
    autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    is_plain = class_weights is None and settings.label_smoothing == 0.0
    is_fused = can_fuse(hidden.dtype, is_plain=is_plain, pointwise=pointwise)
    call = _ChunkedCall(pointwise, settings, max(1, min(num_chunks, len(hidden))), is_early, autocast, is_fused)
    loss: Tensor = _ChunkedLoss.apply(call, hidden, weight, bias, targets, class_weights)  # type: ignore[no-untyped-call]
    return loss


class _ChunkedLoss(Function):
    """The loss of all chunks; saves the hidden states, or the gradients if they are early."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _ChunkedCall,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        class_weights: Tensor | None,
    ) -> Tensor:
        ctx.call = call
        divisor = _divisor(call, targets, class_weights)
        needs = ctx.needs_input_grad[1:4]
        gradients = _Gradients(hidden, weight, bias, needs) if call.is_early and any(needs) else None
        losses: list[Tensor] = []
        one = torch.ones((), dtype=torch.float64, device=hidden.device)
        upstream = None if gradients is None else one if divisor is None else one / divisor
        for rows in _rows(call, hidden):
            loss, of_logits = _chunk(call, hidden[rows], weight, bias, targets[rows], class_weights, upstream)
            losses.append(loss)
            if gradients is not None:
                gradients.add(rows, of_logits)
            del of_logits
        if gradients is not None:
            ctx.save_for_backward(*gradients.results())
        else:
            ctx.save_for_backward(hidden, weight, bias, targets, class_weights)
        return _joined(call, losses, divisor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        call: _ChunkedCall = ctx.call
        if call.is_early:
            scaled = [None if g is None else g * upstream for g in ctx.saved_tensors]
            return None, *scaled, None, None
        hidden, weight, bias, targets, class_weights = ctx.saved_tensors
        divisor = _divisor(call, targets, class_weights)
        gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad[1:4])
        for rows in _rows(call, hidden):
            each = upstream[rows] if call.settings.reduction == "none" else upstream
            each = each if divisor is None else each / divisor
            gradients.add(rows, _chunk(call, hidden[rows], weight, bias, targets[rows], class_weights, each)[1])
        return None, *gradients.results(), None, None


class _Gradients:
    """The gradients of hidden states, weight and bias, summed over chunks."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, ...]):
        self.hidden, self.weight, self.bias, self.needs = hidden, weight, bias, needs
        self._of_hidden = torch.empty_like(hidden) if needs[0] else None
        self._wide = torch.promote_types(weight.dtype, torch.float32)
        self._of_weight: Tensor | None = None
        self._of_bias: Tensor | None = None

    def add(self, rows: slice, of_logits: Tensor) -> None:
        """Adds what the gradient of a chunk's logits contributes."""
        with _without_autocast(of_logits):
            if self._of_hidden is not None:
                torch.mm(of_logits, self.weight, out=self._of_hidden[rows])
            if self.needs[1]:
                self._add_weight(of_logits.t(), self.hidden[rows])
            if self.needs[2]:
                part = of_logits.sum(0, dtype=self._wide)
                self._of_bias = part if self._of_bias is None else self._of_bias.add_(part)

    def _add_weight(self, left: Tensor, right: Tensor) -> None:
        total, is_wide = self._of_weight, self._wide == self.weight.dtype
        if not is_wide and left.is_cuda:  # the product is summed in float32 as it is made
            product = torch.ops.aten.mm.dtype if total is None else torch.ops.aten.addmm.dtype_out
            into = {} if total is None else {"out": total}
            self._of_weight = product(*(() if total is None else (total,)), left, right, self._wide, **into)
        elif total is None:
            self._of_weight = torch.mm(left, right).to(self._wide)
        elif is_wide:
            total.addmm_(left, right)
        else:
            total.add_(torch.mm(left, right))

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns the gradients in the dtypes of their tensors, None for those that nothing needs."""
        of_weight, self._of_weight = self._of_weight, None
        of_bias = None if self._of_bias is None or self.bias is None else self._of_bias.to(self.bias.dtype)
        return self._of_hidden, None if of_weight is None else of_weight.to(self.weight.dtype), of_bias


def _rows(call: _ChunkedCall, hidden: Tensor) -> Iterator[slice]:
    """Yields the rows of each chunk: all chunks have one size but for the last."""
    size = -(-len(hidden) // call.num_chunks) or 1
    for start in range(0, max(1, len(hidden)), size):
        yield slice(start, start + size)


def _chunk(
    call: _ChunkedCall,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weights: Tensor | None,
    upstream: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns the loss of a chunk, a sum or one number per token, and the gradient of its logits.

    Without `upstream`, the gradient of the loss, nothing needs that of the logits.
    """
    if not call.is_fused:
        loss, leaf = _loss_of(call, hidden, weight, bias, targets, class_weights, upstream is not None)
        return loss.detach(), leaf if upstream is None else _gradient(loss, leaf, upstream)
    with torch.no_grad(), _without_autocast(hidden):
        logits = functional.linear(hidden, weight, bias)
        scales = None if upstream is None else upstream.float().expand(len(targets)).contiguous()
        losses = fused_loss_(logits, targets, scales, call.settings.ignore_index)
        loss = losses if call.settings.reduction == "none" else losses.sum()
        return loss.to(_loss_dtype(call, hidden)), logits


def _loss_dtype(call: _ChunkedCall, hidden: Tensor) -> torch.dtype:
    """Returns the dtype of a loss that is not fused."""
    kind, _, is_enabled = call.autocast
    if is_enabled and kind == "cuda":
        return torch.float32
    return apply_all(call.pointwise, torch.empty((1, 1), dtype=hidden.dtype)).dtype


def _loss_of(
    call: _ChunkedCall,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weights: Tensor | None,
    keeps_graph: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the loss of a chunk, a sum or one number per token, and the logits that its graph begins at."""
    with torch.no_grad(), _without_autocast(hidden):
        leaf = functional.linear(hidden, weight, bias)
    reduction = "none" if call.settings.reduction == "none" else "sum"
    kind, dtype, is_enabled = call.autocast
    # What the graph of a chunk saves lives until the chunk ends; hooks around the call would move or count it.
    with torch.set_grad_enabled(keeps_graph), saved_tensors_hooks(_same, _same):
        leaf.requires_grad_(keeps_graph)
        with _without_autocast(hidden):
            logits = apply_all(call.pointwise, leaf)
        with torch.autocast(kind, dtype, is_enabled):
            loss = functional.cross_entropy(
                logits,
                targets,
                class_weights,
                ignore_index=call.settings.ignore_index,
                reduction=reduction,
                label_smoothing=call.settings.label_smoothing,
            )
    return loss, leaf


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _gradient(loss: Tensor, leaf: Tensor, upstream: Tensor) -> Tensor:
    """Returns the gradient of a chunk's logits."""
    return torch.autograd.grad(loss, leaf, upstream.to(loss.dtype).expand(loss.shape))[0]


def _divisor(call: _ChunkedCall, targets: Tensor, class_weights: Tensor | None) -> Tensor | None:
    """Returns what a mean divides by: the tokens that count, or the sum of their weights; None if it is no mean."""
    if call.settings.reduction != "mean":
        return None
    counts = targets != call.settings.ignore_index
    if class_weights is None:
        return counts.sum()
    return (class_weights[targets.masked_fill(~counts, 0)] * counts).sum()


def _joined(call: _ChunkedCall, losses: list[Tensor], divisor: Tensor | None) -> Tensor:
    """Returns the loss of all chunks from the loss of each."""
    if call.settings.reduction == "none":
        return torch.cat(losses)
    total = torch.stack([loss.to(torch.promote_types(loss.dtype, torch.float32)) for loss in losses]).sum()
    return (total if divisor is None else total / divisor).to(losses[0].dtype)


def _without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    return torch.autocast(tensor.device.type, enabled=False)
