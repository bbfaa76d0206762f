"""Collectives inside of the units that devices divide, by layout."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipedejavu.facts import Unit
from pipedejavu.plan.plan_trait import division_kind

_NUM_ALL_REDUCES = 2
"""All-reduces of a unit's output per forward and per backward, if it is not known what its graph needs."""
_NUM_EXCHANGES = 4
"""All-to-alls of an attention whose sequence is divided: queries, keys, values and the result."""


class UnitCollective(NamedTuple):
    """A collective of a divided unit, by the bytes of what each device puts in."""

    kind: str
    sample_bytes: float
    """Bytes per sample."""
    fixed_bytes: float = 0.0

    def size_bytes(self, samples: float) -> float:
        """Returns the bytes for a microbatch of `samples`."""
        return self.fixed_bytes + self.sample_bytes * samples


def unit_collectives(layouts: Sequence[str], size: int, unit: Unit, *, is_backward: bool) -> Iterator[UnitCollective]:
    """Yields the collectives of a forward or backward if `size` devices divide a unit by some layouts.

    They are those that the unit's graph needs, if the profile has them. Otherwise the unit counts as one block: it has
    two all-reduces, or under `context` an attention. If the sequence is divided, a gather and a scattered sum stand for
    each all-reduce, and products gather their inputs again in the backward.
    """
    kind = division_kind(layouts)
    if (known := unit.divided_sums.get(f"{kind}/{size}")) is not None:
        yield from (UnitCollective("all-reduce", n) for n in (known.backward if is_backward else known.forward))
        yield from (UnitCollective("all-to-all", n) for n in known.exchanges)
        if is_backward:
            yield from (UnitCollective("all-gather", n) for n in known.gathers)
        if is_backward and known.gradient_bytes:
            yield UnitCollective("all-reduce", 0.0, known.gradient_bytes)
        return
    sent_bytes = unit.boundary_bytes
    if kind == "context":
        yield from [UnitCollective("all-to-all", sent_bytes / size)] * _NUM_EXCHANGES
        if is_backward:
            yield UnitCollective("all-reduce", 0.0, unit.gradient_bytes)
        return
    yield from [UnitCollective("all-reduce", sent_bytes)] * _NUM_ALL_REDUCES
    if is_backward and "sequence" in layouts:
        yield from [UnitCollective("all-gather", sent_bytes)] * _NUM_ALL_REDUCES


def parameter_share(layouts: Sequence[str], size: int, unit: Unit) -> float:
    """Returns the share of a unit's parameters that `size` devices divide by some layouts."""
    if "context" in layouts:
        return 0.0
    known = unit.divided_sums.get(f"{division_kind(layouts)}/{size}")
    return 1.0 if known is None else known.parameter_share


def work_share(layouts: Sequence[str], size: int, unit: Unit) -> float:
    """Returns the share of a unit's work that `size` devices divide by some layouts."""
    known = unit.divided_sums.get(f"{division_kind(layouts)}/{size}")
    return 1.0 if known is None else known.work_share
