"""The exact searcher of chains: dynamic programming over suffixes of units and of devices.

The cost is Σ a + max z over stages. Under a bound on z the least Σ a is a shortest path, from the last stage to the
first, as z only grows with the sum behind a stage. A better plan than the best so far must have its z below best − Σ a,
which is the next bound. So every bound rules out all that lies above it, and the loop ends with the optimum.
"""

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from pipedejavu.search.cost import Costs, StageCost, Sums
from pipedejavu.search.draft import Draft, Scene, Stage
from pipedejavu.search.option import Options
from pipedejavu.search.pool import Pool
from pipedejavu.search.promise import solve_frames
from pipedejavu.search.seat import Seat, seat_of
from pipedejavu.search.space import Frame

EXACT = 1e-10
"""Parts of a time that do not count."""


@dataclass(frozen=True)
class _Table:
    """Stages of `size` devices before `after` others that fit, one for each pair of a start and an end."""

    after: int
    size: int
    start: NDArray[np.intp]
    end: NDArray[np.intp]
    cost: StageCost


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
    tables = _tables(frame, costs, limit_s)
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


def _tables(frame: Frame, costs: Costs, limit_s: float) -> list[_Table]:
    """Returns the stages that may stand before each number of devices in a pipeline that takes less than a time.

    There are none where all of them together would be too short.
    """
    count, tables, are_alike, length = len(frame.order), list[_Table](), _are_alike(frame), 0
    sums: dict[object, tuple[NDArray[np.intp], NDArray[np.intp], Sums]] = {}
    known: dict[object, tuple[NDArray[np.intp], NDArray[np.intp], StageCost]] = {}
    for after in range(count):
        for size in frame.sizes:
            if after + size > count or (len(frame.sizes) == 1 and after % size):
                continue
            place = frame.row.place(after, size)
            seat = seat_of(place, frame.microbatches, frame.is_stale)
            alike, key = (place.kinds, place.cpu, seat.share), (seat.live, place.likeness())
            if alike not in sums:
                start, end = _pairs(seat, costs, limit_s)
                sums[alike] = start, end, costs.add_up(start, end, place, frame.mode)
            if key not in known:
                start, end, found = sums[alike]
                cost = costs.stage(start, end, seat, frame.mode, found)
                fits = (cost.device_bytes <= place.room_bytes) & (cost.host_bytes <= place.host_room_bytes)
                known[key] = start[fits], end[fits], StageCost(seat, *(column[fits] for column in cost[1:]))
            tables.append(_Table(after, size, *known[key]))
            if are_alike:  # and the more devices are behind a stage the more it holds, so that none gets longer
                longest = int((tables[-1].end - tables[-1].start).max(initial=0))
                length += longest
                if length + longest * (count // size - len(tables)) < costs.num_units:
                    return []
    return tables


def _are_alike(frame: Frame) -> bool:
    """Whether stages differ in nothing that memory depends on but in how many are behind them."""
    size = frame.sizes[0]
    places = (frame.row.place(after, size) for after in range(0, len(frame.order), size))
    return len(frame.sizes) == 1 and len({(p.kinds, p.room_bytes, p.host_room_bytes) for p in places}) == 1


def _pairs(seat: Seat, costs: Costs, limit_s: float) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Returns where stages begin and end whose work alone is not too much: most are too long for a good pipeline."""
    may_be = np.triu(np.ones((costs.num_units + 1,) * 2, dtype=bool), 1)
    for kind in seat.place.kinds if limit_s < inf else ():
        work = costs.times(kind)[0] + costs.times(kind)[1]
        may_be &= (seat.share - 1) * (work - work[:, None]) <= limit_s * (1 + EXACT)
    start, end = np.nonzero(may_be)
    return start, end


def _least_slowest(frame: Frame, costs: Costs, tables: list[_Table]) -> float:
    """Returns what the largest z is at least, whatever stands behind each stage."""
    best = np.full((len(frame.order) + 1, costs.num_units + 1), inf)
    best[0, -1] = 0.0
    for table in tables:
        slowest = np.maximum(table.cost.bound_s(0.0), best[table.after, table.end])
        np.minimum.at(best[table.after + table.size], table.start, slowest)
    return float(best[-1, 0])


def _shortest(frame: Frame, costs: Costs, tables: list[_Table], bound: float) -> _Path | None:
    """Returns the path with the least sum of those whose stages are all within the bound."""
    units, limit = costs.num_units, bound * (1 + EXACT / 2)
    best = np.full((len(frame.order) + 1, units + 1), inf)
    best[0, -1] = 0.0
    chosen = np.zeros(best.shape, dtype=np.intp)
    ends = np.zeros_like(chosen)
    for index, table in enumerate(tables):
        behind, ahead = best[table.after, table.end], table.after + table.size
        total = np.full((units + 1, units + 1), inf)
        total[table.start, table.end] = np.where(table.cost.bound_s(behind) <= limit, table.cost.sum_s + behind, inf)
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
        here = (table.start == start) & (table.end == last)
        slowest = max(slowest, float(table.cost.bound_s(best[table.after, last])[here][0]))
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
