"""The units of a model: its blocks in order, and the modules around them.

A unit is the smallest part of a model that is placed. Blocks are the children of lists (`ModuleList`, `Sequential`, or
a module with a `units()` method). Each other module that holds parameters itself is a unit too.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn


@dataclass(eq=False)
class ModelUnit:
    """A module, and those of its parameters that no earlier unit uses."""

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    shares: list["ModelUnit"] = field(default_factory=list)
    """Earlier units whose parameters this unit also uses."""
    is_block: bool = False
    is_shared: bool = False
    """Whether later units also use its parameters."""


def find_units(model: nn.Module) -> list[ModelUnit]:
    """Returns the units of a model in the order of its modules; each parameter belongs to exactly one unit."""
    return _owned(_candidates(model, "", is_block=False))


def given_units(named: Sequence[tuple[str, nn.Module]]) -> list[ModelUnit]:
    """Returns the given modules as units, each of them a block; each parameter belongs to the first that uses it."""
    return _owned((name, module, True, module.named_parameters(name, remove_duplicate=False)) for name, module in named)


def _owned(candidates: "Iterable[_Candidate]") -> list[ModelUnit]:
    """Returns the candidates that hold or share parameters, with every parameter in the first that uses it."""
    units: list[ModelUnit] = []
    owners: dict[int, ModelUnit] = {}
    for name, module, is_block, parameters in candidates:
        unit = ModelUnit(name, module, is_block=is_block)
        for full_name, parameter in parameters:
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
_Candidate = tuple[str, nn.Module, bool, Named]
"""A module that may be a unit: name, module, whether it is a block, parameters by their full names."""


def _candidates(module: nn.Module, name: str, *, is_block: bool) -> Iterator[_Candidate]:
    """Yields each module of a model that may be a unit."""
    prefix = f"{name}." if name else ""
    if is_block:
        yield name, module, True, module.named_parameters(name, remove_duplicate=False)
        return
    direct = [(prefix + n, p) for n, p in module.named_parameters(recurse=False)]
    if direct:
        yield name, module, False, direct
    children = [(n, child) for n, child in module.named_children() if any(True for _ in child.parameters())]
    is_list = _is_list(module) and len(children) > 1
    for n, child in children:
        nested = _is_list(child) and len(list(child.children())) > 1
        yield from _candidates(child, prefix + n, is_block=is_list and not nested)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential) or callable(getattr(module, "units", None))
