"""Optimizers as pure arithmetic on a piece's tensors: settings, state and one step.

The state belongs to a piece, not to a weight version: a step takes the gradients and writes new weights, in
place or into new tensors, as its caller needs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """Stochastic gradient descent, with or without momentum."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: Callable[[int], float] | None = None
    """Factor of the learning rate at each update, counted from 0."""
    decays: Callable[[str], bool] = field(default=lambda _: True)
    """Which parameters, by name, weight decay applies to."""

    def rate(self, update: int) -> float:
        """Returns the learning rate of an update."""
        return self.lr * self.schedule(update) if self.schedule else self.lr

    def step(self, update: int, weights: Tensors, gradients: Tensors, state: dict[str, Tensors]) -> Tensors:
        """Returns what to add to each weight."""
        lr = self.rate(update)
        deltas = {}
        for name, gradient in gradients.items():
            if self.weight_decay and self.decays(name):
                gradient = gradient + self.weight_decay * weights[name].detach()
            if self.momentum:
                own = state.setdefault(name, {})
                velocity = own.get("momentum")
                velocity = gradient.clone() if velocity is None else velocity.mul_(self.momentum).add_(gradient)
                own["momentum"] = gradient = velocity
            deltas[name] = gradient * -lr
        return deltas


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    schedule: Callable[[int], float] | None = None
    decays: Callable[[str], bool] = field(default=lambda _: True)

    def rate(self, update: int) -> float:
        """Returns the learning rate of an update."""
        return self.lr * self.schedule(update) if self.schedule else self.lr

    def step(self, update: int, weights: Tensors, gradients: Tensors, state: dict[str, Tensors]) -> Tensors:
        """Returns what to add to each weight."""
        lr, (beta1, beta2) = self.rate(update), self.betas
        deltas = {}
        for name, gradient in gradients.items():
            own = state.setdefault(name, {})
            if not own:
                own |= {"step": torch.zeros(()), "m": torch.zeros_like(gradient), "v": torch.zeros_like(gradient)}
            own["step"] += 1
            count = own["step"].item()
            mean = own["m"].mul_(beta1).add_(gradient, alpha=1 - beta1)
            square = own["v"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            scale = (square.sqrt() / math.sqrt(1 - beta2**count)).add_(self.eps)
            delta = (mean / scale).mul_(-lr / (1 - beta1**count))
            if self.weight_decay and self.decays(name):
                delta = delta - lr * self.weight_decay * weights[name].detach()
            deltas[name] = delta
        return deltas


Optimizer = Sgd | AdamW
