"""Chains: models that list their units in order.

A list is used only if it is certain to be the whole model: the model has no forward or hook of its own. Any other model
is traced.
"""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from pipedejavu.facts import InputError

Units = Sequence[tuple[str, nn.Module]]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def is_chain(model: nn.Module) -> bool:
    """Whether a model lists its own units."""
    return _listed(model) is not None


def read_chain(model: nn.Module) -> Units:
    """Returns a chain's units by name, in order; each takes the output of the one before it.

    A chain is an nn.Sequential, or a module with a method `units` that lists them; see `cut_model` for other models. A
    module that the chain uses twice becomes two units that share parameters.
    """
    units = _listed(model)
    if units is None:
        raise InputError(
            f"a {type(model).__name__} is no chain; give an nn.Sequential, or a method units() that lists"
            " (name, module) pairs in order"
        )
    return units


def _listed(model: nn.Module) -> Units | None:
    if any(not is_own(hook) for hooks in _HOOKS for hook in getattr(model, hooks).values()):
        return None
    if callable(getattr(model, "units", None)):
        units = _from_method(model)
        if units is not None:
            return units
    if not isinstance(model, nn.Sequential) or not len(model) or not _is_plain(model):
        return None
    return list(model._modules.items())  # named_children() omits a module's second use


def _is_plain(model: nn.Sequential) -> bool:
    """Whether a Sequential runs its modules exactly as nn.Sequential does."""
    kind, known = type(model), nn.Sequential
    is_unchanged = kind.forward is known.forward and kind.__iter__ is known.__iter__ and kind.__call__ is known.__call__
    return is_unchanged and "forward" not in vars(model)


def _from_method(model: nn.Module) -> Units | None:
    """Returns the units that the method `units` lists, or None if they are not certain to be the whole model."""
    method: Any = model.units
    try:
        inspect.signature(method).bind()
        units = method()
    except Exception:  # an unrelated method may raise anything
        return None
    if not isinstance(units, list | tuple) or not units or not all(map(_is_pair, units)):
        return None
    modules = dict(model.named_modules(remove_duplicate=False))
    names = [name for name, _ in units]
    held = {id(parameter) for _, module in units for parameter in module.parameters()}
    is_whole = all(id(parameter) in held for parameter in model.parameters())
    is_inside = len({*names}) == len(names) and all(modules.get(name) is module for name, module in units)
    return list(units) if is_whole and is_inside else None


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], nn.Module)


def is_own(hook: object) -> bool:
    """Whether a hook is one of this package that only copies trained weights into the model before a call."""
    return bool(getattr(hook, "only_refreshes", False))
