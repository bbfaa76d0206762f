"""What of a model is placed as one: its blocks in order, and the modules around them.

A unit is the smallest stretch of a model whose optimizer state has one place. Blocks are the children of the model's
lists, and of a chain that lists its `units()`; whatever module holds parameters outside of them is a unit of its own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import nn


@dataclass(eq=False)
class ModelUnit:
    """A stretch of a model: a module, and the parameters that it is the first to use."""

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    shares: list["ModelUnit"] = field(default_factory=list)
    """Earlier units whose parameters this one uses too."""
    is_block: bool = False
    is_shared: bool = False
    """Whether later units use its parameters too."""


def find_units(model: nn.Module) -> list[ModelUnit]:
    """Returns the units of a model in the order in which it lists them; all its parameters are in one of them."""
    units: list[ModelUnit] = []
    owners: dict[int, ModelUnit] = {}
    for name, module, is_block, own in _stretches(model, "", is_block=False):
        unit = ModelUnit(name, module, is_block=is_block)
        for full_name, parameter in own:
            owner = owners.setdefault(id(parameter), unit)
            if owner is unit:
                unit.parameters.setdefault(full_name, parameter)
            elif owner not in unit.shares:
                unit.shares.append(owner)
                owner.is_shared = True
        if unit.parameters or unit.shares:
            units.append(unit)
    return units


Named = Iterable[tuple[str, nn.Parameter]]


def _stretches(module: nn.Module, name: str, *, is_block: bool) -> Iterator[tuple[str, nn.Module, bool, Named]]:
    """Yields name, module, whether it is a block, and its parameters under their full names."""
    prefix = f"{name}." if name else ""
    if is_block:
        yield name, module, True, module.named_parameters(name, remove_duplicate=False)
        return
    own = [(prefix + n, p) for n, p in module.named_parameters(recurse=False)]
    if own:
        yield name, module, False, own
    children = [(n, child) for n, child in module.named_children() if any(True for _ in child.parameters())]
    is_list = _is_list(module) and len(children) > 1
    for n, child in children:
        nested = _is_list(child) and len(list(child.children())) > 1
        yield from _stretches(child, prefix + n, is_block=is_list and not nested)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential) or callable(getattr(module, "units", None))
