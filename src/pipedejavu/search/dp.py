"""The exact searcher of chains: dynamic programming over suffixes of units and of devices.

The cost is Σ a + max z over stages. Under a bound on z the least Σ a is a shortest path, from the last stage to the
first, as z only grows with the sum behind a stage. A better plan than the best so far must have its z below best − Σ a,
which is the next bound. So every bound rules out all that lies above it, and the loop ends with the optimum.
What a stage costs depends on the devices behind it and on the workers that they are: these two are the states.
"""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipedejavu.search.cost import Costs, StageCost, Sums
from pipedejavu.search.draft import Array, Draft, Scene, Stage
from pipedejavu.search.option import Options
from pipedejavu.search.pool import Pool
from pipedejavu.search.promise import solve_frames
from pipedejavu.search.seat import Seat, seat_of
from pipedejavu.search.space import Frame

EXACT = 1e-10
"""Parts of a time that do not count."""


@dataclass(frozen=True)
class _Table:
    """Stages of one group that fit, one or two for each pair of a start and an end."""

    behind: int
    """The state of what stands behind them; `ahead` is that with them."""
    ahead: int
    group: tuple[str, ...]
    shards: int
    found: "_Stages"


class _Stages(NamedTuple):
    """Arrays of stages, and what they cost."""

    start: NDArray[np.intp]
    end: NDArray[np.intp]
    zero: NDArray[np.intp]
    cost: StageCost

    def only(self, which: NDArray[np.bool_]) -> "_Stages":
        """Returns some of them."""
        columns = (column[which] for column in self.cost[1:])
        return _Stages(self.start[which], self.end[which], self.zero[which], StageCost(self.cost.seat, *columns))


@dataclass(frozen=True)
class _Path:
    """A cut of all units."""

    steps: tuple[tuple[_Table, int], ...]
    """Each a table and a position there, from the first stage on."""
    sum_s: float
    slowest_s: float

    @property
    def time_s(self) -> float:
        return self.sum_s + self.slowest_s


def solve(frame: Frame, costs: Costs, limit_s: float = inf) -> Draft | None:
    """Returns the best draft of a frame that fits and takes less than `limit_s`; None where there is none."""
    tables = _tables(frame, costs, limit_s)
    least = _least_slowest(costs, tables)
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
    return None if best is None else _draft(frame, costs, best)


def _tables(frame: Frame, costs: Costs, limit_s: float) -> list[_Table]:
    """Returns the stages that may stand before others in a pipeline that takes less than a time, those last first."""
    count, tables = len(frame.order), list[_Table]()
    sums: dict[object, tuple[NDArray[np.intp], NDArray[np.intp], Sums]] = {}
    known: dict[object, list[_Stages]] = {}
    states: dict[int, dict[int, int]] = {0: {0: FIRST}, count: {0: LAST}}
    number = LAST
    for after in range(count):
        for workers, behind in states.get(after, {}).items():
            for size, shards in frame.groups(after):
                place = frame.row.place(after, size, shards)
                seat = seat_of(place, frame.microbatches, frame.is_stale, 0, workers)
                alike, key = (place.kinds, place.cpu, seat.share), (seat.live, place.likeness())
                if alike not in sums:
                    start, end = _pairs(seat, costs, limit_s)
                    sums[alike] = start, end, costs.add_up(start, end, place, frame.mode)
                if key not in known:
                    known[key] = _choose(frame, costs, seat, *sums[alike])
                ends = after + size * shards
                ahead = states.setdefault(ends, {}).setdefault(0 if ends == count else workers + size, number + 1)
                number = max(number, ahead)
                group = frame.order[count - ends : count - after]
                tables += [_Table(behind, ahead, group, shards, found) for found in known[key]]
    return tables


FIRST, LAST = 0, 1
"""States: nothing stands behind a stage, and nothing before."""


def _choose(
    frame: Frame, costs: Costs, seat: Seat, start: NDArray[np.intp], end: NDArray[np.intp], sums: Sums
) -> list[_Stages]:
    """Returns the stages that fit, each with the ZeRO stage that is best for it; where neither is, with both."""
    place, found = seat.place, list[tuple[_Stages, NDArray[np.bool_]]]()
    for zero in frame.zeros if len(place.group) > 1 else (0,):
        cost = costs.stage(start, end, seat._replace(zero=zero), frame.mode, sums)
        fits = (cost.device_bytes <= place.room_bytes) & (cost.host_bytes <= place.host_room_bytes)
        found.append((_Stages(start, end, np.full_like(start, zero), cost), fits))
    if len(found) == 1:
        return [found[0][0].only(found[0][1])]
    (whole, whole_fits), (divided, divided_fits) = found
    pairs = [*zip(divided.cost[1:4], whole.cost[1:4], strict=True)]
    is_no_slower = np.logical_and.reduce([one <= other for one, other in pairs])
    is_no_faster = np.logical_and.reduce([one >= other for one, other in pairs])
    divides = divided_fits & (is_no_slower | ~whole_fits)
    columns = (np.where(divides, one, other) for one, other in zip(divided.cost[1:], whole.cost[1:], strict=True))
    best = _Stages(start, end, np.where(divides, divided.zero, whole.zero), StageCost(seat, *columns))
    either = divided_fits & whole_fits & ~is_no_slower & ~is_no_faster
    return [best.only(divided_fits | whole_fits), *([divided.only(either)] if either.any() else [])]


def _pairs(seat: Seat, costs: Costs, limit_s: float) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Returns where stages begin and end whose work alone is not too much: most are too long for a good pipeline."""
    may_be = np.triu(np.ones((costs.num_units + 1,) * 2, dtype=bool), 1)
    for kind in seat.place.kinds if limit_s < inf else ():
        work = costs.times(kind)[0] + costs.times(kind)[1]
        may_be &= (seat.share - 1) * (work - work[:, None]) <= limit_s * (1 + EXACT)
    start, end = np.nonzero(may_be)
    return start, end


def _least_slowest(costs: Costs, tables: list[_Table]) -> float:
    """Returns what the largest z is at least, whatever stands behind each stage."""
    best = _unreached(costs, tables)
    for table in tables:
        start, end, _, cost = table.found
        slowest = np.maximum(cost.bound_s(0.0), best[table.behind, end])
        np.minimum.at(best[table.ahead], start, slowest)
    return float(best[LAST, 0])


def _unreached(costs: Costs, tables: list[_Table]) -> Array:
    """Returns what there is to add to: for each state and each first unit of it, nothing, or that it is not reached."""
    best = np.full((max((table.ahead for table in tables), default=LAST) + 1, costs.num_units + 1), inf)
    best[FIRST, -1] = 0.0
    return best


def _shortest(frame: Frame, costs: Costs, tables: list[_Table], bound: float) -> _Path | None:
    """Returns the path with the least sum of those whose stages are all within the bound."""
    units, limit = costs.num_units, bound * (1 + EXACT / 2)
    best = _unreached(costs, tables)
    chosen = np.zeros(best.shape, dtype=np.intp)
    ends = np.zeros_like(chosen)
    for index, table in enumerate(tables):
        start, end, _, cost = table.found
        behind, ahead = best[table.behind, end], table.ahead
        total = np.full((units + 1, units + 1), inf)
        total[start, end] = np.where(cost.bound_s(behind) <= limit, cost.sum_s + behind, inf)
        least = total.argmin(axis=1)
        found = total[np.arange(units + 1), least]
        better = found < best[ahead]
        best[ahead] = np.where(better, found, best[ahead])
        chosen[ahead] = np.where(better, index, chosen[ahead])
        ends[ahead] = np.where(better, least, ends[ahead])
    if best[LAST, 0] == inf:
        return None
    steps, state, first, slowest = [], LAST, 0, 0.0
    while state != FIRST:
        table, last = tables[chosen[state, first]], int(ends[state, first])
        at = int(np.flatnonzero((table.found.start == first) & (table.found.end == last))[0])
        steps.append((table, at))
        slowest = max(slowest, float(table.found.cost.bound_s(best[table.behind, last])[at]))
        state, first = table.behind, last
    total_s = 0.0 if frame.is_stale else float(best[LAST, 0])
    return _Path(tuple(steps), total_s, slowest)


def _draft(frame: Frame, costs: Costs, path: _Path) -> Draft:
    """Returns the draft of a path, with state whole wherever dividing it saves no time."""
    stages, behind_s = list[Stage](), 0.0
    for table, at in reversed(path.steps):
        found = table.found
        start, end, zero, cost = int(found.start[at]), int(found.end[at]), int(found.zero[at]), found.cost
        sum_s = float(cost.sum_s[at])
        if zero and 0 in frame.zeros:
            place, whole = cost.seat.place, costs.stage(start, end, cost.seat._replace(zero=0), frame.mode)
            fits = whole.device_bytes <= place.room_bytes and whole.host_bytes <= place.host_room_bytes
            if fits and whole.sum_s <= sum_s and whole.bound_s(behind_s) <= path.slowest_s:
                zero = 0
        behind_s += sum_s
        stages.insert(0, Stage(start, end, table.group, table.shards, zero))
    return Draft(frame.scene, tuple(stages), frame.samples, frame.microbatches, frame.mode, frame.is_stale)


def run(pool: Pool, scenes: list[Scene], options: Options) -> bool:
    """Solves frames exactly, the most promising first, until none can be better."""
    return solve_frames(pool, scenes, options, solve)
