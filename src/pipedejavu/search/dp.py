"""The exact searcher of chains: dynamic programming over suffixes of units and of devices.

The cost is Σ a + max z over stages. Under a bound on z the least Σ a is a shortest path, from the last stage to the
first, as z only grows with the sum behind a stage. A better plan than the best so far must have its z below best − Σ a,
which is the next bound. So every bound rules out all that lies above it, and the loop ends with the optimum.
"""

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from pipedejavu.search.cost import Costs, StageCost
from pipedejavu.search.draft import Draft, Scene, Stage
from pipedejavu.search.option import Options
from pipedejavu.search.pool import Pool
from pipedejavu.search.promise import solve_frames
from pipedejavu.search.seat import seat_of
from pipedejavu.search.space import Frame

EXACT = 1e-10
"""Parts of a time that do not count."""


@dataclass(frozen=True)
class _Table:
    """Stages of `size` devices before `after` others, by their start and end."""

    after: int
    size: int
    cost: StageCost
    fits: NDArray[np.bool_]


@dataclass(frozen=True)
class _Path:
    """A cut of all units."""

    steps: tuple[tuple[_Table, int, int], ...]
    sum_s: float
    slowest_s: float

    @property
    def time_s(self) -> float:
        return self.sum_s + self.slowest_s


def solve(frame: Frame, costs: Costs, limit_s: float = inf) -> Draft | None:
    """Returns the best draft of a frame that fits and takes less than `limit_s`; None where there is none."""
    tables = _tables(frame, costs)
    least = _least_slowest(frame, costs, tables)
    best, bound = None, inf
    while bound >= least and least < limit_s:
        found = _shortest(frame, costs, tables, bound)
        if found is None:
            break
        if found.time_s < limit_s:
            best, limit_s = found, found.time_s
        if found.sum_s + least >= limit_s * (1 - EXACT):
            break
        if bound == inf and (lowest := _shortest(frame, costs, tables, least)) and lowest.time_s < limit_s:
            best, limit_s = lowest, lowest.time_s  # often there is one, and then it is good
        bound = min(found.slowest_s, limit_s - found.sum_s) * (1 - EXACT)
    return None if best is None else _draft(frame, best)


def _tables(frame: Frame, costs: Costs) -> list[_Table]:
    """Returns the stages that may stand before each number of devices."""
    count, units = len(frame.order), costs.num_units
    start, end = np.indices((units + 1, units + 1))
    tables = []
    known: dict[object, tuple[StageCost, NDArray[np.bool_]]] = {}
    for after in range(count):
        for size in frame.sizes:
            if after + size > count or (len(frame.sizes) == 1 and after % size):
                continue
            place = frame.row.place(after, size)
            seat = seat_of(place, frame.microbatches, frame.is_stale)
            key = (seat.live, place.likeness())
            if key not in known:
                cost = costs.stage(start, end, seat, frame.mode)
                fits = (cost.device_bytes <= place.room_bytes) & (cost.host_bytes <= place.host_room_bytes)
                known[key] = cost, fits & (start < end)
            tables.append(_Table(after, size, *known[key]))
    return tables


def _least_slowest(frame: Frame, costs: Costs, tables: list[_Table]) -> float:
    """Returns what the largest z is at least, whatever stands behind each stage."""
    best = np.full((len(frame.order) + 1, costs.num_units + 1), inf)
    best[0, -1] = 0.0
    for table in tables:
        slowest = np.where(table.fits, table.cost.bound_s(0.0), inf)
        found = np.maximum(slowest, best[table.after]).min(axis=1)
        best[table.after + table.size] = np.minimum(best[table.after + table.size], found)
    return float(best[-1, 0])


def _shortest(frame: Frame, costs: Costs, tables: list[_Table], bound: float) -> _Path | None:
    """Returns the path with the least sum of those whose stages are all within the bound."""
    units, limit = costs.num_units, bound * (1 + EXACT / 2)
    best = np.full((len(frame.order) + 1, units + 1), inf)
    best[0, -1] = 0.0
    chosen = np.zeros(best.shape, dtype=np.intp)
    ends = np.zeros_like(chosen)
    for index, table in enumerate(tables):
        behind, ahead = best[table.after], table.after + table.size
        is_allowed = table.fits & (table.cost.bound_s(behind) <= limit)
        total = np.where(is_allowed, table.cost.sum_s + behind, inf)
        end = total.argmin(axis=1)
        found = total[np.arange(units + 1), end]
        better = found < best[ahead]
        best[ahead] = np.where(better, found, best[ahead])
        chosen[ahead] = np.where(better, index, chosen[ahead])
        ends[ahead] = np.where(better, end, ends[ahead])
    if best[-1, 0] == inf:
        return None
    steps, used, start, slowest = [], len(frame.order), 0, 0.0
    while used:
        table, last = tables[chosen[used, start]], int(ends[used, start])
        steps.append((table, start, last))
        slowest = max(slowest, float(table.cost.bound_s(best[table.after])[start, last]))
        used, start = table.after, last
    total_s = 0.0 if frame.is_stale else float(best[-1, 0])
    return _Path(tuple(steps), total_s, slowest)


def _draft(frame: Frame, path: _Path) -> Draft:
    count, stages = len(frame.order), []
    for table, start, end in path.steps:
        first = count - table.after - table.size
        stages.append(Stage(start, end, frame.order[first : first + table.size]))
    return Draft(frame.scene, tuple(stages), frame.samples, frame.microbatches, frame.mode, frame.is_stale)


def run(pool: Pool, scenes: list[Scene], options: Options) -> bool:
    """Solves frames exactly, the most promising first, until none can be better."""
    return solve_frames(pool, scenes, options, solve)
