"""Models as chains: the units of a module that lists them in order.

A list is trusted only where it must be the whole model: no forward or hook of the model's own comes between. Any other
model is recorded.
"""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from pipedejavu.facts import InputError

Units = Sequence[tuple[str, nn.Module]]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def is_chain(model: nn.Module) -> bool:
    """Whether a model lists its units itself."""
    return _listed(model) is not None


def read_chain(model: nn.Module) -> Units:
    """Returns a model's units by name, in order; each takes the output of the one before it.

    A chain is an nn.Sequential, or a module with a method `units` that lists them; see `cut_model` for all others. A
    module that the chain uses twice is two units that share their parameters.
    """
    units = _listed(model)
    if units is None:
        raise InputError(
            f"a {type(model).__name__} is no chain; give an nn.Sequential, or a method units() that lists"
            " (name, module) pairs in order"
        )
    return units


def _listed(model: nn.Module) -> Units | None:
    if any(getattr(model, hooks) for hooks in _HOOKS):
        return None
    if callable(getattr(model, "units", None)):
        units = _told(model)
        if units is not None:
            return units
    if not isinstance(model, nn.Sequential) or not len(model) or not _is_plain(model):
        return None
    return list(model._modules.items())  # named_children() would leave out a module's second use


def _is_plain(model: nn.Sequential) -> bool:
    """Whether a Sequential runs its modules as nn.Sequential does."""
    kind, known = type(model), nn.Sequential
    is_own = kind.forward is known.forward and kind.__iter__ is known.__iter__ and kind.__call__ is known.__call__
    return is_own and "forward" not in vars(model)


def _told(model: nn.Module) -> Units | None:
    """Returns what a method `units` lists, if that can be the whole model; it may be a method of another meaning."""
    method: Any = model.units
    try:
        inspect.signature(method).bind()
        units = method()
    except Exception:  # a method of another meaning may raise anything
        return None
    if not isinstance(units, list | tuple) or not units or not all(map(_is_pair, units)):
        return None
    own = dict(model.named_modules(remove_duplicate=False))
    names = [name for name, _ in units]
    held = {id(parameter) for _, module in units for parameter in module.parameters()}
    is_whole = all(id(parameter) in held for parameter in model.parameters())
    is_own = len({*names}) == len(names) and all(own.get(name) is module for name, module in units)
    return list(units) if is_whole and is_own else None


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], nn.Module)
