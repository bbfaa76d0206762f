"""The forward of all units in order, and the loss, on the weights that rest in their modules.

Random numbers inside a unit depend only on the run's seed, the microbatch and the unit, as in the engine.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.recompute_span import like, tensors_of
from pipedejavu.engine.unit_random import Unit
from pipedejavu.program import ActionKind
from pipedejavu.runtime.compiled_unit import LossCall
from pipedejavu.runtime.deferred_head import DeferredHead

Passed = Callable[[ActionKind, int], None]
"""Called with the kind of a pass that begins, and the number of its unit."""


class UnitChain:
    """The units of a job, which run one after another, and its loss."""

    def __init__(
        self,
        runners: Sequence[PieceRunner],
        recomputed: Collection[int],
        loss: Callable[[Any, Any], Tensor],
        plain: Mapping[int, nn.Module],
    ):
        """Takes the pieces in order, and units without the optimizer's hooks to compile; see `without_later_hooks`."""
        self._runners, self._loss, self._plain = runners, loss, plain
        self._recomputed = recomputed
        self._compiled = set[Hashable]()
        """Recomputed units that were compiled, with the kind of their input."""
        self._last = runners[-1].units[-1][0]
        copying = {n for runner in runners for n, _, module in runner.units if _works_in_place(module)}
        self._copying = {n for n in copying if n == 0 or n in recomputed}
        """Units that may change their input in place and must not, because it is the batch or is read again."""

    def forward(self, value: Any, targets: Any, microbatch: int, passed: Passed, *, is_recorded: bool) -> Tensor:
        """Returns the loss."""
        head = LossCall(self._loss, targets)
        for runner, unit in ((piece, unit) for piece in self._runners for unit in piece.units):
            number, is_last = unit[0], unit[0] == self._last
            passed(ActionKind.FORWARD, number)
            if number in self._copying:
                value = like(value, [tensor.clone() for tensor in tensors_of(value)])
            use = runner.head if is_last else None
            call, has_loss = self._call(runner, unit, microbatch, head if is_last else None)
            with nullcontext() if use is None else DeferredHead(use):
                value = runner.random.run(number, call, value, microbatch)
            if is_recorded and use is None:  # a gradient of deferred logits never exists
                _watch(value, lambda _, number=number: passed(ActionKind.BACKWARD, number))
        loss: Tensor = value if has_loss else self._loss(value, targets)
        if is_recorded and use is not None:
            _watch(loss, lambda _: passed(ActionKind.BACKWARD, self._last))
        return loss

    def _call(
        self, runner: PieceRunner, unit: Unit, microbatch: int, head: LossCall | None
    ) -> tuple[Callable[[Any], Any], bool]:
        """Returns what runs a unit, and whether it returns the loss: compiled with the last unit."""
        number, name, module = unit
        if runner.compiler is None or (head is not None and runner.head is not None):
            return module, False
        plain = self._plain[number]
        compiled = partial(runner.run_compiled, (number, name, plain), microbatch, head)
        if number in self._recomputed:  # HybridAdamW recomputes through the module, which this call passes by
            compiled = partial(self._recompute, runner, number, microbatch, compiled)
        return partial(_run_within_hooks, module, plain, compiled), head is not None

    def _recompute(
        self, runner: PieceRunner, number: int, microbatch: int, call: Callable[[Any], Any], value: Any
    ) -> Any:
        """Runs a compiled unit that keeps only its input, and runs again in the backward.

        The first call on each kind of input may run the unit more than once to compile it, so it comes before.
        """
        kind = (number, tuple((t.shape, t.dtype, t.requires_grad) for t in tensors_of(value)))
        draws = not runner.random.is_deterministic(number)
        if kind not in self._compiled:
            self._compiled.add(kind)
            call(value)
            if draws:
                runner.random.seed_generators(number, value, microbatch)
        return checkpoint(call, value, use_reentrant=False, preserve_rng_state=draws)


def without_later_hooks(module: nn.Module) -> nn.Module:
    """Returns the same module, with the same parameters, buffers and parts, without hooks that are added to it later.

    Hooks of the optimizer wait for weights and copy them; what they call cannot be compiled with the unit.
    """
    same: nn.Module = object.__new__(type(module))
    same.__dict__.update(module.__dict__)
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        same.__dict__[name] = OrderedDict(module.__dict__[name])
    return same


def _run_within_hooks(module: nn.Module, plain: nn.Module, call: Callable[[Any], Any], value: Any) -> Any:
    """Runs a unit by `call`, and the hooks that were added to it since `plain` was made, before and after it."""
    for key, before in [*module._forward_pre_hooks.items()]:
        if key not in plain._forward_pre_hooks:
            before(module, (value,))
    output = call(value)
    for key, after in [*module._forward_hooks.items()]:
        if key not in plain._forward_hooks:
            after(module, (value,), output)
    return output


def _works_in_place(module: nn.Module) -> bool:
    return any(getattr(part, "inplace", False) for part in module.modules())


def _watch(value: Any, begin: Callable[..., None]) -> None:
    """Makes the backward call `begin` when the gradient of a unit's output is ready."""
    for tensor in tensors_of(value):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(begin)  # type: ignore[no-untyped-call]


def move_shared(units: Sequence[tuple[str, nn.Module]], device: torch.device) -> None:
    """Moves buffers and frozen parameters to a device; those that several modules share stay shared."""
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for part in {id(p): p for _, module in units for p in module.modules()}.values():
        places += [(part._buffers, key, t) for key, t in part._buffers.items() if t is not None]
        frozen = ((key, p) for key, p in part._parameters.items() if p is not None and not p.requires_grad)
        places += [(part._parameters, key, p) for key, p in frozen]
    moved = {id(tensor): _moved(tensor, device) for _, _, tensor in places}
    for place, key, tensor in places:
        place[key] = moved[id(tensor)]


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    there = tensor.detach().to(device)
    return nn.Parameter(there, requires_grad=False) if isinstance(tensor, nn.Parameter) else there
