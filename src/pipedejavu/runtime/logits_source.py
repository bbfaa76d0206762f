"""What deferred logits are made of, as records: a linear layer's inputs, and the operations that follow it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class TensorOperation:
    """An operation on a tensor, with its other arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, tensor: Tensor) -> Tensor:
        """Returns the result of the operation on a tensor."""
        result: Tensor = self.function(tensor, *self.args, **self.kwargs)
        return result


@dataclass(frozen=True, kw_only=True)
class LogitsSource:
    """The inputs of a head, and what is done to its logits."""

    hidden: Tensor
    """The head's input, one row per row of logits: the token dimensions are those of the logits, in their order."""
    weight: Tensor
    bias: Tensor | None
    form: Tensor
    """A tensor on the meta device with the shape, strides and dtype of the logits."""
    pointwise: tuple[TensorOperation, ...] = ()
    """The operations that map each logit on its own, in order."""
    is_class_second: bool = False
    """Whether the vocabulary is dimension 1 instead of the last one."""

    def compute(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the logits of a hidden state, weight and bias with the dtypes and shapes of these."""
        with torch.autocast(hidden.device.type, enabled=False):
            logits = functional.linear(hidden, weight, bias)
            for operation in self.pointwise:
                logits = operation(logits)
        return logits.movedim(-1, 1) if self.is_class_second else logits

    def after(self, operation: TensorOperation, form: Tensor | None = None, **changes: Any) -> "DerivedLogits":
        """Returns what an operation makes of these logits: this source with `changes`.

        `form` is the result on the meta device, by default that of the operation.
        """
        form = operation(self.form) if form is None else form
        return DerivedLogits(replace(self, form=form, **changes), operation)


class DerivedLogits(NamedTuple):
    """The logits that an operation makes of others."""

    source: LogitsSource
    operation: TensorOperation
