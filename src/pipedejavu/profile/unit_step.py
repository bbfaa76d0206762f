"""Runs one unit's training step, part by part; a meter decides what is recorded.

The parts are those that programs name: forward and backward; then the forward again, and the backward's two halves.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipedejavu.facts import InputError
from pipedejavu.runtime.split_backward import backward_inputs

PARTS = ("forward", "backward", "recompute", "input_backward", "weight_backward")


@dataclass(frozen=True)
class LossHead:
    """The loss after the last unit."""

    loss: Callable[[Any, Any], Tensor]
    """Takes the last unit's output and the targets."""
    targets: Any

    def __call__(self, output: Any) -> Tensor:
        """Returns the loss of an output."""
        return self.loss(output, self.targets)


class StepMeter(Protocol):
    """Records something about each part of a step, such as its time."""

    def part(self, name: str) -> AbstractContextManager[None]:
        """Records what runs inside the `with` block, under a name."""


@runtime_checkable
class HalvesMeter(Protocol):
    """Also records what the first half of a backward leaves to the second."""

    def between(self, pending: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Is given what is kept, and the gradients of the unit's outputs."""


class NullMeter:
    """A meter that records nothing."""

    def part(self, name: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """Runs a part unmeasured."""
        return nullcontext()


@dataclass(frozen=True)
class _Forward:
    inputs: list[Tensor]
    """Leaves whose gradients the previous unit needs."""
    output: Any
    roots: list[Tensor]
    seeds: list[Tensor]


def run_step(module: nn.Module, value: Any, head: LossHead | None, is_first: bool, meter: StepMeter) -> Any:
    """Runs each part once and returns the unit's output; the first unit's inputs need no gradient.

    A part without work is skipped.
    """
    weights = [p for p in module.parameters() if p.requires_grad]
    whole = _forward(module, value, head, is_first, meter, "forward")
    if whole.roots:
        with meter.part("backward"):
            torch.autograd.backward(whole.roots, whole.seeds)
    output = whole.output
    del whole
    module.zero_grad()
    again = _forward(module, value, head, is_first, meter, "recompute")
    _run_halves(again, weights, meter)
    module.zero_grad()
    return output


def _run_halves(forward: _Forward, weights: Sequence[Tensor], meter: StepMeter) -> None:
    """Runs both halves as the engine does: the second is the whole backward if no input has a gradient."""
    roots, seeds, inputs = forward.roots, forward.seeds, forward.inputs
    if roots and inputs:
        with meter.part("input_backward"):
            _, pending = backward_inputs(roots, seeds, inputs, weights)
        if isinstance(meter, HalvesMeter):
            meter.between(pending.tensors, seeds)
        if weights:
            with meter.part("weight_backward"):
                pending.accumulate()
    elif roots and weights:
        with meter.part("weight_backward"):
            torch.autograd.backward(roots, seeds)


def run_several(
    module: nn.Module, value: Any, head: LossHead | None, is_first: bool, meter: StepMeter, count: int
) -> None:
    """Runs `count` forwards, then their backwards as one, like a step with that many such units."""
    leaves, inputs = zip(*(_inputs(value, is_first) for _ in range(count)), strict=True)
    with meter.part("forward"):
        results = [_run(module, each, head) for each in inputs]
    ends = [_ends(*each) for each in zip(leaves, results, strict=True)]
    roots, seeds = ([t for end in ends for t in getattr(end, name)] for name in ("roots", "seeds"))
    if roots:
        with meter.part("backward"):
            torch.autograd.backward(roots, seeds)
    module.zero_grad()


def _forward(
    module: nn.Module, value: Any, head: LossHead | None, is_first: bool, meter: StepMeter, part: str
) -> _Forward:
    leaves, inputs = _inputs(value, is_first)
    with meter.part(part):
        result = _run(module, inputs, head)
    return _ends(leaves, result)


def _inputs(value: Any, is_first: bool) -> tuple[list[Tensor], Any]:
    """Returns leaves, and copies of them to pass to a unit, which may change its inputs in place."""
    leaves = [t.detach().requires_grad_(has_gradient(t) and not is_first) for t in tensors_of(value)]
    copies = [leaf.clone() for leaf in leaves]
    return leaves, tuple(copies) if isinstance(value, tuple) else copies[0]


def _run(module: nn.Module, inputs: Any, head: LossHead | None) -> tuple[Any, list[Tensor]]:
    """Returns a unit's output, and the tensors that its backward starts from."""
    output = module(inputs)
    return output, tensors_of(head(output) if head else output)


def _ends(leaves: list[Tensor], result: tuple[Any, list[Tensor]]) -> _Forward:
    output, ends = result
    roots = [t for t in ends if t.requires_grad]
    return _Forward([t for t in leaves if t.requires_grad], output, roots, [torch.ones_like(t) for t in roots])


def has_gradient(tensor: Tensor) -> bool:
    """Whether a tensor's dtype can have gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def tensors_of(value: Any) -> list[Tensor]:
    """Returns a value's tensors; raises InputError if units cannot pass it on."""
    tensors = list(value) if isinstance(value, tuple) else [value]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise InputError(
                f"a {type(tensor).__name__} passes between the layers of a chain, which pass on a tensor or a tuple of"
                " tensors; return these, or give a module whose forward calls the layers, which is cut as a graph"
            )
    return tensors


def detached(value: Any) -> Any:
    """Returns a value detached from its autograd graph."""
    tensors = tuple(t.detach() for t in tensors_of(value))
    return tensors if isinstance(value, tuple) else tensors[0]


def moved(value: Any, device: torch.device) -> Any:
    """Returns a value with all its tensors moved to a device, in nested tuples, lists and dicts too."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), value)
