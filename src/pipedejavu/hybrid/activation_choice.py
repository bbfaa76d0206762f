"""What each block keeps of its forward for its backward: everything, only its arguments, or everything on the host."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from pipedejavu.facts import InputError
from pipedejavu.hybrid.model_unit import ModelUnit
from pipedejavu.runtime.block_offload import BlockOffload
from pipedejavu.runtime.lane import CopyLanes
from pipedejavu.runtime.recompute import Recompute

Activations = Literal["keep", "recompute", "offload", "chunk"]
"""`chunk` is for the linear layer before the loss; see `head_choice`."""


def set_activations(
    units: Sequence[ModelUnit], choice: Activations | Mapping[str, Activations], lanes: CopyLanes
) -> list[Callable[[], None]]:
    """Wraps the forward of each block as chosen, for all blocks or by name; returns the calls that undo it."""
    blocks = [unit for unit in units if unit.is_block]
    chosen = {unit.name: choice for unit in blocks} if isinstance(choice, str) else dict(choice)
    names = [unit.name for unit in blocks]
    for name, value in chosen.items():
        if name not in names:
            raise InputError(f"activations names '{name}', which is no block; the blocks are {', '.join(names)}")
        if value not in ("keep", "recompute", "offload"):
            raise InputError(f"activations of '{name}' is '{value}'; give keep, recompute or offload")
    offload = BlockOffload(lanes)
    undo: list[Callable[[], None]] = []
    for n, unit in enumerate(blocks):
        value, module = chosen.get(unit.name, "keep"), unit.module
        if value == "keep":
            continue
        original, override = module.forward, module.__dict__.get("forward")
        offloading = partial(offload.run, n, module, original)
        recomputing = Recompute(module, original, lanes.device)
        module.forward = partial(_forward, original, recomputing if value == "recompute" else offloading)
        undo.append(partial(_restore, module, override))
    return undo


def _restore(module: nn.Module, override: Callable[..., Any] | None) -> None:
    """Restores the forward that was set on the module itself, or that of its class."""
    module.__dict__.pop("forward", None)
    if override is not None:
        module.forward = override


def _forward(plain: Callable[..., Any], saving: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return saving(*args, **kwargs) if torch.is_grad_enabled() else plain(*args, **kwargs)
