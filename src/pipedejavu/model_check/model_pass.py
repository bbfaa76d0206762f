"""One forward and backward pass over a microbatch, by the user's uncut model or by its units as the engine runs them.

Both run on copies, so no weight, buffer, gradient or Python attribute of the user's model changes. Both draw random
numbers in the order of their operations, from generators that the caller has seeded.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipedejavu.engine import Job
from pipedejavu.engine.optimizer import Tensors
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.recompute_span import Saved, backward, like, tensors_of, with_loss
from pipedejavu.engine.unit_random import OrderedRandom
from pipedejavu.profile import ModelCut
from pipedejavu.profile.model_trace import as_call
from pipedejavu.program import Program

Loss = Callable[[Any, Any], Tensor]
_Module = TypeVar("_Module", bound=nn.Module)


class Sample(NamedTuple):
    """A microbatch in the user's form."""

    inputs: Any
    """Inputs of the user's model: a tensor, a tuple of arguments or a mapping of keyword arguments."""
    targets: Any


class Checked(NamedTuple):
    """The input of a check: a model, its units in a program's pieces, and microbatches for both."""

    model: nn.Module
    cut: ModelCut
    job: Job
    loss: Loss
    """Loss as a function of the model's output and the targets."""
    program: Program
    samples: Sequence[Sample]


@dataclass(frozen=True)
class Pass:
    """The results of a forward and backward pass over one microbatch, under the model's names."""

    outputs: Sequence[Tensor]
    loss: Tensor
    gradients: Tensors
    """Gradients of trained parameters; a tied one under its first name."""
    state: Tensors
    """Parameters and buffers after the pass; they share the model's memory and are valid until it runs again."""


class WholeModel:
    """A copy of the user's model, called as the user calls it."""

    def __init__(self, model: nn.Module, is_chain: bool, loss: Loss, device: torch.device):
        self.model, self.is_chain, self.loss, self.device = copied_to(model, device), is_chain, loss, device

    def run(self, inputs: Any, targets: Any) -> Pass:
        """Runs a forward and backward pass of the model and its loss."""
        output = self.forward(inputs)
        loss = self.loss(output, placed(targets, self.device))
        self.model.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return Pass(leaves_of(output), loss.detach(), gradients, self.state())

    def state(self) -> Tensors:
        """Returns the copy's parameters and buffers, under all their names."""
        parameters = self.model.named_parameters(remove_duplicate=False)
        tensors = chain(parameters, self.model.named_buffers(remove_duplicate=False))
        return {name: tensor.detach() for name, tensor in tensors}

    def forward(self, inputs: Any) -> Any:
        """Returns the model's output."""
        inputs = placed(inputs, self.device)
        args, kwargs = ((inputs,), {}) if self.is_chain else as_call(inputs)
        with torch.enable_grad():
            return self.model(*args, **kwargs)

    def perturb(self) -> None:
        """Changes every weight by about one unit in its last place, to measure the effect of rounding."""
        with torch.no_grad():
            for weight in self.model.parameters():
                if weight.is_floating_point():
                    signs = torch.where(torch.arange(weight.numel(), device=weight.device) % 2 == 0, 1.0, -1.0)
                    weight.mul_(1 + torch.finfo(weight.dtype).eps * signs.view_as(weight).to(weight.dtype))


class DividedModel:
    """Copies of a model's units, separate for each worker, run as the pieces of a program."""

    def __init__(self, model: nn.Module, cut: ModelCut, job: Job, program: Program, device: torch.device):
        self.cut, self.job, self.program, self.device = cut, job, program, device
        self.names = first_names(model)
        self.count = 0
        holders: dict[int, int] = {}
        for worker in range(len(program.workers)):
            for held, _ in program.held(worker):
                holders.setdefault(held, worker)
        units: dict[tuple[int, int], tuple[str, nn.Module]] = {}
        for worker in {*holders.values()}:
            numbers = [u for p, piece in enumerate(program.pieces) if holders[p] == worker for u in piece.units]
            copies = [
                (job.units[number][0], module) for number, module in zip(numbers, self._copies(numbers), strict=True)
            ]
            units |= {(worker, number): unit for number, unit in zip(numbers, copies, strict=True)}
        self.runners = []
        for number, piece in enumerate(program.pieces):
            piece_units = [(u, *units[holders[number], u]) for u in piece.units]
            runner = PieceRunner(piece_units, job.seed, program.recomputed[number]).to(device)
            runner.random = OrderedRandom(job.seed, piece_units)
            self.runners.append(runner)
        self.weights = [
            {name: w.to(device).detach().requires_grad_() for name, w in runner.initial.items()}
            for runner in self.runners
        ]

    def _copies(self, numbers: Sequence[int]) -> nn.ModuleList:
        """Returns copies of some units on the device; what they share, their copies share."""
        return copied_to(nn.ModuleList(self.job.units[number][1] for number in numbers), self.device)

    def run(self, inputs: Any, targets: Any) -> Pass:
        """Runs a forward and a backward pass through all pieces."""
        self.count += 1
        value, piece_inputs, saved = self.cut.flat(placed(inputs, self.device)), [], list[Saved]()
        targets = placed(targets, self.device)
        for number, runner in enumerate(self.runners):
            piece_inputs.append(value)
            value, kept = runner.forward(self.weights[number], value, self.count, is_first=number == 0)
            saved.append(kept)
            if number < len(self.runners) - 1:
                value = like(value, [t.detach() for t in tensors_of(value)])
        loss = self.job.loss(value, targets)
        saved[-1] = with_loss(saved[-1], loss)
        passed: tuple[Tensor, ...] = (torch.ones_like(loss),)
        gradients: Tensors = {}
        for number in reversed(range(len(self.runners))):
            passed, named = backward(self._again(number, piece_inputs[number], saved[number], targets), passed)
            for name, gradient in named.items():
                first = self.names.get(name, name)
                gradients[first] = gradients[first] + gradient if first in gradients else gradient
        return Pass(leaves_of(self.cut.output(value)), loss.detach(), gradients, self._state())

    def _again(self, number: int, inputs: Any, saved: Saved, targets: Any) -> Saved:
        """Recomputes what the engine would recompute before a piece's backward; returns the saved tensors."""
        again, weights = self.program.recomputed[number], self.weights[number]
        if not again:
            return saved
        runner, is_last = self.runners[number], number == len(self.runners) - 1
        if not self.program.keeps_saved(number):
            value, saved = runner.forward(weights, inputs, self.count, keeps_buffers=True, is_first=number == 0)
            return with_loss(saved, self.job.loss(value, targets)) if is_last else saved
        value, saved = runner.forward_again(weights, saved, self.count)
        ends = self.program.pieces[number].units[-1] in again
        return with_loss(saved, self.job.loss(value, targets)) if is_last and ends else saved

    def _state(self) -> Tensors:
        """Returns the state of all pieces; for a buffer on several workers, the copy of the last piece."""
        state: Tensors = {}
        for runner, weights in zip(self.runners, self.weights, strict=True):
            state |= {name: weight.detach() for name, weight in weights.items()} | runner.frozen
            for _, unit, module in runner.units:
                buffers = module.named_buffers(unit, remove_duplicate=False)
                state |= {name: buffer.detach() for name, buffer in buffers}
        return state


def copied_to(module: _Module, device: torch.device) -> _Module:
    """Returns a deep copy on a device; parameters and buffers are copied there at once, not on the way too."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        if type(parameter) is nn.Parameter and parameter.device != device and parameter.grad is None:
            there = parameter.detach().to(device, copy=True)
            memo[id(parameter)] = nn.Parameter(there, requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, memo).to(device)


def first_names(model: nn.Module) -> Mapping[str, str]:
    """Maps every name of a parameter to its first name; tied parameters have several."""
    firsts = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: firsts[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}


def placed(value: Any, device: torch.device) -> Any:
    """Returns a copy of all tensors in a value on a device; a model may change its inputs in place."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().to(device, copy=True), value)


def leaves_of(output: Any) -> list[Tensor]:
    """Returns the detached tensors of an output."""
    return [leaf.detach() for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
