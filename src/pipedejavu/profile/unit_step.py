"""One unit's share of a training step, part by part: what is run is decided here, what is noted of it by a meter.

The parts are those that programs name: a forward and its whole backward; then a forward again, and both halves
of its backward apart, each asked of autograd alone.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipedejavu.facts import InputError

PARTS = ("forward", "backward", "recompute", "input_backward", "weight_backward")

Head = Callable[[Any], Tensor]
"""Takes what the last unit returns; returns the loss."""


class StepMeter(Protocol):
    """Notes something of what runs."""

    def part(self, name: str) -> AbstractContextManager[None]:
        """Notes what runs inside, under a name."""


@dataclass(frozen=True)
class _Forward:
    inputs: list[Tensor]
    """The leaves whose gradients the unit before wants."""
    output: Any
    roots: list[Tensor]
    seeds: list[Tensor]


def run_step(module: nn.Module, value: Any, head: Head | None, is_first: bool, meter: StepMeter) -> Any:
    """Runs every part once and returns the unit's output. The first unit's inputs are samples, which need no gradient.

    A part that has nothing to do is left out.
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
    for part, wanted in (("input_backward", again.inputs), ("weight_backward", weights)):
        if again.roots and wanted:
            with meter.part(part):
                torch.autograd.grad(again.roots, wanted, again.seeds, retain_graph=True, allow_unused=True)
    return output


def run_several(module: nn.Module, value: Any, head: Head | None, is_first: bool, meter: StepMeter, count: int) -> None:
    """Runs forwards one behind the other and then their backwards as one, as a step of so many such units does."""
    leaves, given = zip(*(_inputs(value, is_first) for _ in range(count)), strict=True)
    with meter.part("forward"):
        found = [_run(module, each, head) for each in given]
    ends = [_ends(*each) for each in zip(leaves, found, strict=True)]
    roots, seeds = ([t for end in ends for t in getattr(end, name)] for name in ("roots", "seeds"))
    if roots:
        with meter.part("backward"):
            torch.autograd.backward(roots, seeds)
    module.zero_grad()


def _forward(module: nn.Module, value: Any, head: Head | None, is_first: bool, meter: StepMeter, part: str) -> _Forward:
    leaves, given = _inputs(value, is_first)
    with meter.part(part):
        found = _run(module, given, head)
    return _ends(leaves, found)


def _inputs(value: Any, is_first: bool) -> tuple[list[Tensor], Any]:
    """Returns leaves, and copies of them to be given to a unit: it may change what it is given in place."""
    leaves = [t.detach().requires_grad_(has_gradient(t) and not is_first) for t in tensors_of(value)]
    given = [leaf.clone() for leaf in leaves]
    return leaves, tuple(given) if isinstance(value, tuple) else given[0]


def _run(module: nn.Module, given: Any, head: Head | None) -> tuple[Any, list[Tensor]]:
    """Returns a unit's output, and what its backward begins at."""
    output = module(given)
    return output, tensors_of(head(output) if head else output)


def _ends(leaves: list[Tensor], found: tuple[Any, list[Tensor]]) -> _Forward:
    output, ends = found
    roots = [t for t in ends if t.requires_grad]
    return _Forward([t for t in leaves if t.requires_grad], output, roots, [torch.ones_like(t) for t in roots])


def has_gradient(tensor: Tensor) -> bool:
    """Whether a tensor is of a type that gradients have."""
    return tensor.is_floating_point() or tensor.is_complex()


def tensors_of(value: Any) -> list[Tensor]:
    """Returns a value's tensors; raises InputError for what units cannot hand on."""
    tensors = list(value) if isinstance(value, tuple) else [value]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise InputError(
                f"a {type(tensor).__name__} passes between the layers of a chain, which hand on a tensor or a tuple of"
                " tensors; return these, or give a module whose forward calls the layers, which is cut as a graph"
            )
    return tensors


def detached(value: Any) -> Any:
    """Returns a value that remembers nothing of how it was made."""
    return tuple(t.detach() for t in value) if isinstance(value, tuple) else value.detach()


def moved(value: Any, device: torch.device) -> Any:
    """Returns a tensor, or tuples, lists and dicts of them, on a device."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), value)
