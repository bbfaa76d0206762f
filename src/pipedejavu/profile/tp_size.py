"""Finds over how many devices the operators of a model can be divided, by its units' graphs."""

from collections.abc import Sequence

from torch import Tensor, nn

from pipedejavu.facts import InputError
from pipedejavu.profile.segment import Value
from pipedejavu.profile.unit_graph import unit_graphs
from pipedejavu.runtime.division import divide

_TRIED = (2, 4, 8)


def tp_sizes(units: Sequence[tuple[str, nn.Module]], value: Value) -> tuple[int, ...] | None:
    """Returns the numbers of devices that can divide some operator of the units; None if they cannot be traced."""
    try:
        graphs = unit_graphs(units, value)
    except InputError:
        return None
    tied = _tied([module for _, module in units])
    return tuple(size for size in _TRIED if divide(graphs, size, tied).regions)


def _tied(units: Sequence[nn.Module]) -> list[Tensor]:
    """Returns the parameters that several units share: all devices keep them whole."""
    seen, tied = set[int](), list[Tensor]()
    for unit in units:
        own = {id(p): p for p in unit.parameters()}
        tied += [p for key, p in own.items() if key in seen]
        seen |= own.keys()
    return tied
