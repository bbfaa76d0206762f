"""Other optimizers of torch, run as torch runs them, one parameter at a time.

They update each element of a parameter by itself, so that a plan may put parameters and their state anywhere. Does not
know parameter groups.
"""

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim

from pipedejavu.engine.optimizer import LOW, State, Tensors, step_by_deltas
from pipedejavu.facts import InputError
from pipedejavu.optim.moment_format import MomentFormat

KINDS = (
    optim.Adadelta, optim.Adagrad, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop,
)  # fmt: skip
"""Optimizers whose updates of an element depend on nothing but its own gradients."""
_CHOSEN_HERE = ("params", "foreach", "fused", "maximize")


@dataclass(frozen=True)
class GivenOptimizer:
    """An optimizer class of torch with the settings of a parameter group."""

    kind: type[optim.Optimizer]
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, optimizer: optim.Optimizer, group: Mapping[str, Any]) -> "GivenOptimizer":
        """Reads a group; its sign and how torch computes it are the caller's."""
        names = inspect.signature(type(optimizer)).parameters.keys() - {*_CHOSEN_HERE}
        return cls(type(optimizer), {name: group[name] for name in names if name in group})

    def with_moments(self, form: MomentFormat) -> "GivenOptimizer":
        """Returns itself; raises InputError for moments in another format than torch's."""
        if form != "fp32":
            raise InputError(
                f"the plan keeps moments in {form}, and {self.kind.__name__} keeps its own; use AdamW, or fp32 moments"
            )
        return self

    @property
    def lr(self) -> float:
        """The learning rate."""
        return float(self.settings["lr"])

    @property
    def slots(self) -> set[str]:
        """The names of its state per weight, as a first update makes them."""
        state: State = {}
        weight = torch.zeros(1, device="cpu")
        for _ in self.deltas(0, {"": weight}, {"": weight.clone()}, state, 1.0):
            pass
        return {*state[""]}

    def slots_of(self, name: str) -> set[str]:  # noqa: ARG002
        """Returns the names of a parameter's state."""
        return self.slots

    def rate(self, update: int) -> float:  # noqa: ARG002
        """Returns the learning rate of an update."""
        return self.lr

    def shrinks(self, name: str) -> bool:  # noqa: ARG002
        """Whether weight decay changes a parameter even if its gradient is zero."""
        return bool(self.settings.get("weight_decay"))

    def largest_gradient(self, update: int, dtype: torch.dtype) -> float:  # noqa: ARG002
        """Returns the largest mean gradient whose square stays finite."""
        return math.sqrt(torch.finfo(dtype).max) / 2

    def step(
        self, update: int, weights: Tensors, gradients: Tensors, state: State, coefficient: float, out: Tensors
    ) -> None:
        """Writes the new weights to `out`, which may be the gradients or the weights, after one update."""
        for name, gradient in gradients.items():
            step_by_deltas(self, update, name, weights, gradient, state, coefficient, out)

    def deltas(
        self,
        update: int,  # noqa: ARG002
        weights: Tensors,
        gradients: Tensors,
        state: State,
        coefficient: float,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields what to add to each weight, in the memory of its gradient, after multiplying that by `coefficient`."""
        for name, gradient in gradients.items():
            weight, slots = weights[name].detach(), state.setdefault(name, {})
            parameter = nn.Parameter(weight.clone())
            parameter.grad = gradient.mul_(coefficient)
            optimizer: Any = self.kind([parameter], **self.settings)
            optimizer.state[parameter].update({key: value for key, value in slots.items() if key != LOW})
            optimizer.step()
            slots.update(optimizer.state[parameter])
            yield name, torch.sub(parameter.detach(), weight, out=gradient)
