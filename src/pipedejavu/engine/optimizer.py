"""Optimizers as pure arithmetic on a piece's tensors: settings, state and one step.

The state belongs to a piece, not to a weight version. `step` writes new weights, to a new version or in place.
`deltas` turns summed gradients, in place, into what is to be added to the weights; it yields one parameter at a time,
so that the caller reads it from the cache. AdamW of float32 weights on the host is the native pass of `optim`; all else
is torch.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipedejavu.optim.arithmetic import AdamState, scalars_of
from pipedejavu.optim.native import NativeTask, update_on_host

Tensors = dict[str, Tensor]
State = dict[str, Tensors]
"""The slots of each parameter, by its name."""


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """Stochastic gradient descent, with or without momentum."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: Callable[[int], float] | None = None
    """Factor of the learning rate at each update, counted from 0."""
    decays: Callable[[str], bool] = field(default=lambda _: True)
    """Whether weight decay applies to a parameter, by its full name."""

    @property
    def slots(self) -> set[str]:
        """The names of its state per weight."""
        return {"momentum"} if self.momentum else set()

    def rate(self, update: int) -> float:
        """Returns the learning rate of an update."""
        return self.lr * self.schedule(update) if self.schedule else self.lr

    def largest_gradient(self, update: int, dtype: torch.dtype) -> float:
        """Returns the largest mean gradient with which momentum and step stay finite."""
        return torch.finfo(dtype).max * (1 - self.momentum) / 2 / max(1.0, abs(self.rate(update)))

    def step(
        self, update: int, weights: Tensors, gradients: Tensors, state: State, coefficient: float, out: Tensors
    ) -> None:
        """Writes the new weights to `out`, which may be the gradients or the weights, after one update.

        Gradients are multiplied by `coefficient`. They stay as they are unless `out` is in their memory.
        """
        for name, gradient in gradients.items():
            work = {name: gradient if out[name] is gradient else gradient.clone()}
            _add(self.deltas(update, weights, work, state, coefficient), weights, out)

    def deltas(
        self, update: int, weights: Tensors, gradients: Tensors, state: State, coefficient: float
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields what to add to each weight, in the memory of its gradient, after multiplying that by `coefficient`."""
        lr = self.rate(update)
        if not self.momentum and not self.weight_decay:
            for name, gradient in gradients.items():
                yield name, gradient.mul_(-lr * coefficient)
            return
        for name, gradient in gradients.items():
            gradient.mul_(coefficient)
            if self.weight_decay and self.decays(name):
                gradient.add_(weights[name].detach(), alpha=self.weight_decay)
            if self.momentum:
                slots = state.setdefault(name, {})
                if slots:
                    gradient.copy_(slots["momentum"].mul_(self.momentum).add_(gradient))
                else:
                    slots["momentum"] = gradient.clone()
            yield name, gradient.mul_(-lr)


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    schedule: Callable[[int], float] | None = None
    decays: Callable[[str], bool] = field(default=lambda _: True)

    @property
    def slots(self) -> set[str]:
        """The names of its state per weight."""
        return {"step", "m", "v"}

    def rate(self, update: int) -> float:
        """Returns the learning rate of an update."""
        return self.lr * self.schedule(update) if self.schedule else self.lr

    def largest_gradient(self, _update: int, dtype: torch.dtype) -> float:
        """Returns the largest mean gradient whose square, and with it the state, stays finite."""
        return math.sqrt(torch.finfo(dtype).max) / 2

    def step(
        self, update: int, weights: Tensors, gradients: Tensors, state: State, coefficient: float, out: Tensors
    ) -> None:
        """Writes the new weights to `out`, which may be the gradients or the weights, after one update.

        Gradients are multiplied by `coefficient`. They stay as they are unless `out` is in their memory. Parameters in
        host memory are updated together, in one pass.
        """
        tasks = []
        for name, gradient in gradients.items():
            slots = _adam_slots(state, name, gradient)
            if _is_native(weights[name], gradient, slots):
                old = AdamState(weights[name].detach(), None, slots["m"], slots["v"])
                new = old._replace(weight=out[name].detach())
                slots["step"] += 1
                decay = self.weight_decay if self.decays(name) else 0.0
                settings = self.rate(update), self.betas, self.eps, decay
                s = scalars_of(int(slots["step"].item()), *settings, coefficient)
                tasks.append(NativeTask(s, gradient, old, new))
            else:
                work = {name: gradient if out[name] is gradient else gradient.clone()}
                _add(self.deltas(update, weights, work, state, coefficient), weights, out)
        update_on_host(tasks)

    def deltas(
        self, update: int, weights: Tensors, gradients: Tensors, state: State, coefficient: float
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields what to add to each weight, in the memory of its gradient, after multiplying that by `coefficient`."""
        for name, gradient in gradients.items():
            slots = _adam_slots(state, name, gradient)
            if _is_native(weights[name], gradient, slots):
                before = {name: weights[name].detach().clone()}  # other workers may write to the weights meanwhile
                self.step(update, before, {name: gradient}, state, coefficient, {name: gradient})
                yield name, gradient.sub_(before[name])
            else:
                yield name, self._delta(update, name, weights[name].detach(), gradient.mul_(coefficient), slots)

    def _delta(self, update: int, name: str, weight: Tensor, gradient: Tensor, slots: Tensors) -> Tensor:
        """Returns what to add to a weight, in the memory of its gradient, by operations of torch."""
        lr, (beta1, beta2) = self.rate(update), self.betas
        slots["step"] += 1
        count = slots["step"].item()
        mean = slots["m"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        square = slots["v"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        scale = (square.sqrt() / math.sqrt(1 - beta2**count)).add_(self.eps)
        torch.div(mean, scale, out=gradient).mul_(-lr / (1 - beta1**count))
        if self.weight_decay and self.decays(name):
            gradient.sub_(weight, alpha=lr * self.weight_decay)
        return gradient


def _adam_slots(state: State, name: str, gradient: Tensor) -> Tensors:
    """Returns the slots of a parameter, zeros before its first update."""
    slots = state.setdefault(name, {})
    if not slots:
        slots |= {"step": torch.zeros(()), "m": torch.zeros_like(gradient), "v": torch.zeros_like(gradient)}
    return slots


def _is_native(weight: Tensor, gradient: Tensor, slots: Tensors) -> bool:
    """Returns whether a parameter and its state are float32 in host memory."""
    tensors = weight, gradient, slots["m"], slots["v"]
    return all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in tensors)


def _add(deltas: Iterator[tuple[str, Tensor]], weights: Tensors, out: Tensors) -> None:
    for name, delta in deltas:
        torch.add(delta, weights[name].detach(), out=out[name].detach())


Optimizer = Sgd | AdamW
