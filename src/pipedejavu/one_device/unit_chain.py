"""The forward of all units in order, on the weights that rest in their modules.

Random numbers inside a unit depend only on the run's seed, the microbatch and the unit, as in the engine.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.recompute_span import like, tensors_of
from pipedejavu.program import ActionKind

Passed = Callable[[ActionKind, int], None]
"""Called with the kind of a pass that begins, and the number of its unit."""


class UnitChain:
    """The units of a job, which run one after another."""

    def __init__(self, runners: Sequence[PieceRunner], recomputed: Collection[int]):
        """Takes the pieces in order."""
        self._runners = runners
        copying = {n for runner in runners for n, _, module in runner.units if _works_in_place(module)}
        self._copying = {n for n in copying if n == 0 or n in recomputed}
        """Units that may change their input in place and must not, because it is the batch or is read again."""

    def forward(self, value: Any, microbatch: int, passed: Passed, *, is_recorded: bool) -> Any:
        """Returns the output of the last unit."""
        for runner, (number, _, module) in ((piece, unit) for piece in self._runners for unit in piece.units):
            passed(ActionKind.FORWARD, number)
            if number in self._copying:
                value = like(value, [tensor.clone() for tensor in tensors_of(value)])
            value = runner.run_unit(number, module, value, microbatch)
            if is_recorded:
                _watch(value, lambda _, number=number: passed(ActionKind.BACKWARD, number))
        return value


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
