"""Runs a head so that its linear layers return deferred logits.

With `HeadUse.num_chunks` 1 nothing runs in chunks: the logits are computed when the loss needs them, and what becomes
of them is recorded.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pipedejavu.runtime.deferred_logits import HeadUse, Origin, link
from pipedejavu.runtime.logits_source import LogitsSource

_LINEAR = (functional.linear, torch.ops.aten.linear.default)


class DeferredHead(TorchFunctionMode):
    """A context in which linear layers return deferred logits."""

    def __init__(self, use: HeadUse):
        super().__init__()
        self.use = use

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Defers a linear layer, and runs anything else."""
        if func in _LINEAR and not torch.compiler.is_compiling():
            return _defer(self.use, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class DeferringUnit(nn.Module):
    """A unit whose linear layers return deferred logits."""

    def __init__(self, unit: nn.Module, use: HeadUse):
        super().__init__()
        self.unit, self.use = unit, use

    def forward(self, value: Any) -> Any:
        """Runs the unit."""
        with DeferredHead(self.use):
            return self.unit(value)


def _defer(use: HeadUse, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    """Returns the logits of a head, deferred, with the casts that autocast would make."""
    inputs = [tensor for tensor in (input, weight, bias) if tensor is not None]
    kind, casts = input.device.type, inputs
    if torch.is_autocast_enabled(kind) and all(tensor.dtype != torch.float64 for tensor in inputs):
        casts = [tensor.to(torch.get_autocast_dtype(kind)) for tensor in inputs]
    is_plain = all(type(tensor) in (Tensor, nn.Parameter, FakeTensor) for tensor in inputs)
    is_alike = len({(tensor.dtype, tensor.device) for tensor in casts}) == 1 and input.is_floating_point()
    if not is_plain or not is_alike or weight.dim() != 2 or input.dim() < 2 or input.shape[-1] != weight.shape[1]:
        return functional.linear(input, weight, bias)
    form = torch.empty((*input.shape[:-1], len(weight)), dtype=casts[0].dtype, device="meta")
    cast_bias = casts[2] if bias is not None else None
    logits = link(LogitsSource(hidden=casts[0], weight=casts[1], bias=cast_bias, form=form))
    logits.origin = Origin(use, inputs)
    return logits
