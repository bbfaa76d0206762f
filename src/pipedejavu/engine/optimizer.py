"""Optimizers as pure arithmetic on a piece's tensors: settings, state and one step.

The state belongs to a piece, not to a weight version. `step` writes new weights, to a new version or in place.
`deltas` turns summed gradients, in place, into what is to be added to the weights; it yields one parameter at a time,
so that the caller reads it from the cache. AdamW of float32 and split weights is the one of `optim`, on the host and on
GPUs; all else is torch, which updates the joined master of a split weight. The plan says how moments rest.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from pipedejavu.engine.moment_slots import moments_in, slot_names, store_moments, widened_moments, zero_slots
from pipedejavu.optim.arithmetic import AdamState, join, scalars_of, split
from pipedejavu.optim.gpu_update import has_kernel
from pipedejavu.optim.joint_update import update_all
from pipedejavu.optim.moment_format import MomentFormat, Moments, seed_of
from pipedejavu.optim.native import NativeTask

LOW = "low"
"""The slot of the low half of a split weight: a bf16 weight with it is updated as its float32 master."""

Tensors = dict[str, Tensor]
State = dict[str, Tensors]
"""The slots of each parameter, by its name."""


class Optimizer(Protocol):
    """What the engine asks of an optimizer."""

    def with_moments(self, form: MomentFormat) -> "Optimizer":
        """Returns the optimizer with its moments, if it has any, in a format."""

    def slots_of(self, name: str) -> set[str]:
        """Returns the names of a parameter's state."""

    def shrinks(self, name: str) -> bool:
        """Whether weight decay changes a parameter even if its gradient is zero."""

    def rate(self, update: int) -> float:
        """Returns the learning rate of an update."""

    def largest_gradient(self, update: int, dtype: torch.dtype) -> float:
        """Returns the largest mean gradient with which the arithmetic stays finite."""

    def step(
        self, update: int, weights: Tensors, gradients: Tensors, state: State, coefficient: float, out: Tensors
    ) -> None:
        """Writes the new weights to `out`, which may be the gradients or the weights, after one update.

        Gradients are multiplied by `coefficient`. They stay as they are unless `out` is in their memory.
        """

    def deltas(
        self, update: int, weights: Tensors, gradients: Tensors, state: State, coefficient: float
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields what to add to each weight, in the memory of its gradient, after multiplying that by `coefficient`."""


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """Stochastic gradient descent, with or without momentum."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    dampening: float = 0.0
    """Share of each gradient after the first that momentum leaves out."""
    nesterov: bool = False
    schedule: Callable[[int], float] | None = None
    """Factor of the learning rate at each update, counted from 0."""
    decays: Callable[[str], bool] = field(default=lambda _: True)
    """Whether weight decay applies to a parameter, by its full name."""

    def with_moments(self, form: MomentFormat) -> "Sgd":  # noqa: ARG002
        """Returns itself: it has no moments, and its momentum is in the format of the gradients."""
        return self

    @property
    def slots(self) -> set[str]:
        """The names of its state per weight."""
        return {"momentum"} if self.momentum else set()

    def slots_of(self, name: str) -> set[str]:  # noqa: ARG002
        """Returns the names of a parameter's state."""
        return self.slots

    def shrinks(self, name: str) -> bool:
        """Whether weight decay changes a parameter even if its gradient is zero."""
        return bool(self.weight_decay) and self.decays(name)

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
            step_by_deltas(self, update, name, weights, gradient, state, coefficient, out)

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
                if "momentum" in slots:
                    slots["momentum"].mul_(self.momentum).add_(gradient, alpha=1 - self.dampening)
                else:
                    slots["momentum"] = gradient.clone()
                if self.nesterov:
                    gradient.add_(slots["momentum"], alpha=self.momentum)
                else:
                    gradient.copy_(slots["momentum"])
            yield name, gradient.mul_(-lr)


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay, or with weight decay as a part of the gradient."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    is_decoupled: bool = True
    """Whether weight decay acts on the weights (AdamW), and not on the gradients (Adam)."""
    schedule: Callable[[int], float] | None = None
    decays: Callable[[str], bool] = field(default=lambda _: True)
    moments: MomentFormat = "fp32"
    """The format in which moments rest."""

    def with_moments(self, form: MomentFormat) -> "AdamW":
        """Returns the optimizer with its moments in a format."""
        return replace(self, moments=form)

    @property
    def slots(self) -> set[str]:
        """The names of its state per weight."""
        return {"step", *slot_names(self.moments)}

    def slots_of(self, name: str) -> set[str]:  # noqa: ARG002
        """Returns the names of a parameter's state."""
        return self.slots

    def shrinks(self, name: str) -> bool:
        """Whether weight decay changes a parameter even if its gradient is zero."""
        return bool(self.weight_decay) and self.decays(name)

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

        Gradients are multiplied by `coefficient`. They stay as they are unless `out` is in their memory. Parameters are
        updated together, in one pass of the host and one of the GPU.
        """
        tasks = []
        for name, gradient in gradients.items():
            slots, moments = self._slots(state, name, gradient)
            if self._is_shared(name, weights[name], gradient, slots):
                old = AdamState(weights[name].detach(), slots.get(LOW), *moments)
                new = old._replace(weight=out[name].detach())
                slots["step"] += 1
                decay = self.weight_decay if self.shrinks(name) else 0.0
                settings = self.rate(update), self.betas, self.eps, decay
                s = scalars_of(int(slots["step"].item()), *settings, coefficient)
                tasks.append(NativeTask(s, gradient, old, new))
            else:
                step_by_deltas(self, update, name, weights, gradient, state, coefficient, out)
        update_all(tasks)

    def deltas(
        self, update: int, weights: Tensors, gradients: Tensors, state: State, coefficient: float
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields what to add to each weight, in the memory of its gradient, after multiplying that by `coefficient`."""
        for name, gradient in gradients.items():
            slots = self._slots(state, name, gradient)[0]
            if self._is_shared(name, weights[name], gradient, slots):
                before = {name: weights[name].detach().clone()}  # other workers may write to the weights meanwhile
                self.step(update, before, {name: gradient}, state, coefficient, {name: gradient})
                yield name, gradient.sub_(before[name])
            else:
                yield name, self._delta(update, name, weights[name].detach(), gradient.mul_(coefficient), slots)

    def _delta(self, update: int, name: str, weight: Tensor, gradient: Tensor, slots: Tensors) -> Tensor:
        """Returns what to add to a weight, in the memory of its gradient, by operations of torch."""
        lr, (beta1, beta2) = self.rate(update), self.betas
        decays = self.shrinks(name)
        if decays and not self.is_decoupled:
            gradient.add_(weight, alpha=self.weight_decay)
        slots["step"] += 1
        count, moments = slots["step"].item(), moments_in(slots)
        assert moments is not None
        mean, square = widened_moments(moments, gradient.dtype)
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        store_moments(mean, square, moments, seed_of(int(count)))
        scale = (square.sqrt() / math.sqrt(1 - beta2**count)).add_(self.eps)
        torch.div(mean, scale, out=gradient).mul_(-lr / (1 - beta1**count))
        if decays and self.is_decoupled:
            gradient.sub_(weight, alpha=lr * self.weight_decay)
        return gradient

    def _is_shared(self, name: str, weight: Tensor, gradient: Tensor, slots: Tensors) -> bool:
        """Whether the shared arithmetic updates a parameter: float32 or split, with decoupled weight decay."""
        if self.shrinks(name) and not self.is_decoupled:
            return False
        moments = moments_in(slots)
        assert moments is not None
        if moments.m.dtype == torch.float64 or moments.m.device != weight.device:
            return False
        if LOW in slots:
            return True
        if weight.device.type != "cpu" and not has_kernel(weight.device):
            return False  # torch's operations on a GPU are as fast as the arithmetic's without the kernel
        return all(t.dtype == torch.float32 and t.device == weight.device for t in (weight, gradient))

    def _slots(self, state: State, name: str, gradient: Tensor) -> tuple[Tensors, Moments]:
        """Returns the slots of a parameter, and its moments: zeros before its first update."""
        slots = state.setdefault(name, {})
        moments = moments_in(slots)
        if moments is None:
            slots |= {"step": torch.zeros(()), **zero_slots(self.moments, gradient)}
            moments = moments_in(slots)
        assert moments is not None
        return slots, moments


def step_by_deltas(
    rule: Optimizer,
    update: int,
    name: str,
    weights: Tensors,
    gradient: Tensor,
    state: State,
    coefficient: float,
    out: Tensors,
) -> None:
    """Writes the new weight of one parameter by the operations of torch, on the master if the weight is split."""
    weight, low = weights[name].detach(), state.get(name, {}).get(LOW)
    if low is None:
        work = {name: gradient if out[name] is gradient else gradient.clone()}
        for _, delta in rule.deltas(update, weights, work, state, coefficient):
            torch.add(delta, weight, out=out[name].detach())
        return
    master, work = join(weight, low), {name: gradient.to(torch.float32, copy=True)}
    for _, delta in rule.deltas(update, {name: master}, work, state, coefficient):
        high, rest = split(delta.add_(master))
        out[name].detach().copy_(high)
        low.copy_(rest)
