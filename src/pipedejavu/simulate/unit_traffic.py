"""Collectives inside of the units that workers divide, by layout; whatever the unit has, it counts as one block."""

from collections.abc import Iterator

from pipedejavu.facts import Unit
from pipedejavu.plan import Plan
from pipedejavu.plan.plan_trait import division_of
from pipedejavu.program.tp_group import NUM_ALL_REDUCES

_EXCHANGES = 4
"""All-to-alls of an attention whose sequence is divided: queries, keys, values and the result."""


def unit_collectives(plan: Plan, unit: Unit, samples: float, is_backward: bool) -> Iterator[tuple[str, float]]:
    """Yields the collectives of a forward or backward, with the bytes of what each worker of the group puts in.

    They are those that the unit's graph needs, if the profile has them. If the sequence is divided, a gather and a
    scattered sum stand for each all-reduce, and products gather their inputs again in the backward. The gradients of
    norms and biases are left out.
    """
    if (known := unit.divided_sums.get(division_of(plan))) is not None:
        yield from (("all-reduce", size * samples) for size in (known.backward if is_backward else known.forward))
        return
    size = unit.boundary_bytes * samples
    if plan.divides_only_sequence:
        yield from [("all-to-all", size / plan.tensor_shards)] * _EXCHANGES
        if is_backward:
            yield "all-reduce", unit.gradient_bytes
        return
    yield from [("all-reduce", size)] * NUM_ALL_REDUCES
    if is_backward and plan.divides_sequence:
        yield from [("all-gather", size)] * NUM_ALL_REDUCES
