"""Models as chains: the units of a module that lists them in order."""

from collections.abc import Callable, Sequence
from typing import cast

from torch import nn

from pipedejavu.facts import InputError

Units = Sequence[tuple[str, nn.Module]]


def is_chain(model: nn.Module) -> bool:
    """Whether a model lists its units itself."""
    return callable(getattr(model, "units", None)) or (isinstance(model, nn.Sequential) and len(model) > 0)


def read_chain(model: nn.Module) -> Units:
    """Returns a model's units by name, in order; each takes the output of the one before it.

    A chain is an nn.Sequential, or a module with a method `units` that lists them; see `cut_model` for all others.
    """
    listed = getattr(model, "units", None)
    if callable(listed):
        return cast(Callable[[], Units], listed)()
    if isinstance(model, nn.Sequential) and len(model):
        return list(model.named_children())
    raise InputError(
        f"a {type(model).__name__} is no chain; give an nn.Sequential, or a method units() that lists"
        " (name, module) pairs in order"
    )
