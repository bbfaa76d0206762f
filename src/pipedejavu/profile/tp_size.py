"""Finds over how many devices the operators of a model can be divided, and what they then send, by units' graphs."""

from collections.abc import Sequence
from typing import get_args

from torch import Tensor, nn

from pipedejavu.facts import DividedSums, InputError, Profile
from pipedejavu.profile.segment import Value
from pipedejavu.profile.unit_graph import unit_graphs
from pipedejavu.runtime.division import LayoutKind, divide

_TRIED = (2, 4, 8)


def tp_sizes(units: Sequence[tuple[str, nn.Module]], value: Value) -> tuple[int, ...] | None:
    """Returns the numbers of devices that can divide some operator of the units; None if they cannot be traced."""
    try:
        graphs = unit_graphs(units, value)
    except InputError:
        return None
    tied = _tied([module for _, module in units])
    return tuple(size for size in _TRIED if divide(graphs, size, tied).regions)


def with_divided_sums(
    profile: Profile, units: Sequence[tuple[str, nn.Module]], value: Value, samples: int, division: str
) -> Profile:
    """Returns the profile with the all-reduces of units whose operators are divided; `value` has so many samples."""
    layout, _, size = division.partition("/")
    kind: LayoutKind = next(kind for kind in get_args(LayoutKind) if kind == layout)
    found = divide(unit_graphs(units, value), int(size), _tied([module for _, module in units]), kind).collectives()
    described = []
    for number, unit in enumerate(profile.units):
        rows = [row for row in found if row.unit == number]
        forward, backward = (
            tuple(sorted(row.size_bytes / samples for row in rows if row.is_forward == is_forward))
            for is_forward in (True, False)
        )
        sums = unit.divided_sums | {division: DividedSums(forward=forward, backward=backward)}
        described.append(unit.replace(divided_sums=sums))
    return profile.replace(units=tuple(described))


def _tied(units: Sequence[nn.Module]) -> list[Tensor]:
    """Returns the parameters that several units share: all devices keep them whole."""
    seen, tied = set[int](), list[Tensor]()
    for unit in units:
        own = {id(p): p for p in unit.parameters()}
        tied += [p for key, p in own.items() if key in seen]
        seen |= own.keys()
    return tied
