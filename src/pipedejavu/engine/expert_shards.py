"""Units whose experts are divided over the workers of a group, which exchange rows on their wire."""

from collections.abc import Sequence

from torch import Tensor

from pipedejavu.engine.unit_random import Unit, paused_draws
from pipedejavu.engine.wire import Wire
from pipedejavu.program import Program
from pipedejavu.program.program import shard_group
from pipedejavu.runtime.divided_experts import DividedExperts
from pipedejavu.runtime.traffic import Counts


class WireRows:
    """One worker's end of a group that divides experts."""

    def __init__(self, wire: Wire, group: str, rank: int, size: int):
        self.wire, self.group, self.rank, self.size = wire, group, rank, size

    def gather(self, counts: Tensor) -> Tensor:
        """Returns the vectors of all workers, as rows."""
        with paused_draws():
            return self.wire.all_gather(counts, self.group).view(self.size, -1)

    def all_to_all(self, rows: Tensor, table: Counts) -> Tensor:
        """Sends rows to the other workers; returns those that they sent."""
        with paused_draws():
            return self.wire.all_to_all(rows, self.group, table)


def with_divided_experts(program: Program, replica: int, units: Sequence[Unit], wire: Wire) -> list[Unit]:
    """Returns units of a piece, of whose experts a replica holds a part."""
    first, rank = program.mesh_of(replica)
    (stage,) = {piece.stage for piece in program.pieces}
    rows = WireRows(wire, shard_group(stage, first), rank, program.plan.place.shards)
    divided = []
    for number, name, module in units:
        unit = DividedExperts(name, module, rows, program.plan.cut.capacity)
        divided.append((number, name, unit if unit.layouts else module))
    return divided
