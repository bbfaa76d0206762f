"""The exact searcher of chains: dynamic programming over suffixes of units and of devices.

The cost is Σ a + max z over stages. Under a bound on z the least Σ a is a shortest path, from the last stage to the
first, as z only grows with the sum behind a stage. A better plan than the best so far must have its z below best − Σ a,
which is the next bound. So every bound rules out all that lies above it, and the loop ends with the optimum.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf

import numpy as np
from numpy.typing import NDArray

from pipedejavu.search.cost import Costs, StageCost, Sums
from pipedejavu.search.draft import Array, Draft, Scene, Stage
from pipedejavu.search.option import Options
from pipedejavu.search.pool import Pool
from pipedejavu.search.promise import solve_frames
from pipedejavu.search.seat import Seat, seat_of
from pipedejavu.search.space import Frame, frame_of

PLACES = 128
"""For cuts in every frame; where there are more, only every second or third is looked at."""
EXACT = 1e-10
"""Parts of a time that do not count."""


@dataclass(frozen=True)
class _Table:
    """Stages of `size` devices before `after` others that fit: pairs of a start and an end, sorted by starts."""

    after: int
    size: int
    start: NDArray[np.intp]
    end: NDArray[np.intp]
    cost: StageCost

    @cached_property
    def first(self) -> NDArray[np.intp]:
        """Where the pairs of another start begin."""
        return np.flatnonzero(np.diff(self.start, prepend=-1))

    @cached_property
    def bound_s(self) -> Array:
        """What each adds at least once its first microbatch is through."""
        return self.cost.bound_s(0.0)

    def within(self, bound: float) -> "_Table":
        """Returns the table without stages that are above a bound whatever stands behind them."""
        return self.only(self.bound_s <= bound)

    def only(self, chosen: NDArray[np.bool_]) -> "_Table":
        """Returns the table with some of its stages."""
        cost = StageCost(self.cost.seat, *(column[chosen] for column in self.cost[1:]))
        return _Table(self.after, self.size, self.start[chosen], self.end[chosen], cost)


@dataclass(frozen=True)
class _Path:
    """A cut of all units."""

    steps: tuple[tuple[_Table, int, int], ...]
    sum_s: float
    slowest_s: float

    @property
    def time_s(self) -> float:
        return self.sum_s + self.slowest_s


def solve(frame: Frame, costs: Costs, limit_s: float = inf, step: int = 1) -> Draft | None:
    """Returns the best draft of a frame that fits and takes less than `limit_s`; None where there is none.

    Of a model with many units it is found sooner among the cuts behind every `step`-th one.
    """
    tables = _tables(frame, costs, limit_s, step)
    least = _least_slowest(frame, costs, tables)
    best, bound, probe = None, inf, least
    while bound >= least and least < limit_s:
        found = _shortest(frame, costs, tables, bound)
        if found is None:
            break
        if found.time_s < limit_s:
            best, limit_s = found, found.time_s
        if found.sum_s + least >= limit_s * (1 - EXACT):
            break
        # Bounds would come down by little where many plans have the same sum: so one far below is tried, too.
        lower = _shortest(frame, costs, tables, probe)
        if lower is None:
            least = probe
        elif lower.time_s < limit_s:
            best, limit_s = lower, lower.time_s
        bound = (limit_s - found.sum_s) * (1 - EXACT)
        probe = (least + bound) / 2
        tables = [table.within(bound) for table in tables]
    return None if best is None else _draft(frame, best)


def _tables(frame: Frame, costs: Costs, limit_s: float, step: int) -> list[_Table]:
    """Returns the stages that may stand before each number of devices in a pipeline that takes less than a time.

    There are none where all of them together would be too short.
    """
    count, tables, are_alike, length = len(frame.order), list[_Table](), _are_alike(frame), 0
    sums: dict[object, tuple[NDArray[np.intp], NDArray[np.intp], Sums]] = {}
    known: dict[object, _Table] = {}
    for after in range(count):
        for size in frame.sizes:
            if after + size > count or (len(frame.sizes) == 1 and after % size):
                continue
            place = frame.row.place(after, size)
            seat = seat_of(place, frame.microbatches, frame.is_stale)
            ends = (after == 0, after + size == count)  # the last stage ends with the model, the first begins with it
            alike, key = (place.kinds, place.cpu, seat.share, ends), (seat.live, place.likeness(), ends)
            if alike not in sums:
                start, end = _pairs(seat, costs, limit_s, step, *ends)
                sums[alike] = start, end, costs.add_up(start, end, place, frame.mode)
            if key not in known:
                start, end, found = sums[alike]
                cost = costs.stage(start, end, seat, frame.mode, found)
                fits = (cost.device_bytes <= place.room_bytes) & (cost.host_bytes <= place.host_room_bytes)
                known[key] = _Table(after, size, start, end, cost).only(fits)
            tables.append(replace(known[key], after=after))
            if are_alike:
                longest = int((tables[-1].end - tables[-1].start).max(initial=0))
                length += longest
                # The more devices are behind a stage the more it holds, so that none before this one is longer.
                if after and length + longest * (count // size - len(tables)) < costs.num_units:
                    return []
    return tables


def _are_alike(frame: Frame) -> bool:
    """Whether stages differ in nothing that memory depends on but in how many are behind them."""
    size = frame.sizes[0]
    places = (frame.row.place(after, size) for after in range(0, len(frame.order), size))
    return len(frame.sizes) == 1 and len({(p.kinds, p.room_bytes, p.host_room_bytes) for p in places}) == 1


def _pairs(
    seat: Seat, costs: Costs, limit_s: float, step: int, is_last: bool, is_first: bool
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Returns where stages begin and end whose work alone is not too much: most are too long for a good pipeline."""
    units = costs.num_units
    places = np.array([*range(0, units, step), units])
    starts = np.arange(1 if is_first else len(places) - 1)
    most = np.full_like(starts, len(places) - 1)
    for kind in seat.place.kinds if seat.share > 1 and limit_s < inf else ():
        work = (costs.times(kind)[0] + costs.times(kind)[1])[places]
        longest = work[starts] + limit_s * (1 + EXACT) / (seat.share - 1)
        most = np.minimum(most, np.searchsorted(work, longest * (1 + EXACT), side="right") - 1)
    if is_last:
        starts = places[starts[most == len(places) - 1]]
        return starts, np.full_like(starts, units)
    counts = most - starts
    begins = np.repeat(np.cumsum(counts) - counts, counts)
    start = np.repeat(starts, counts)
    return places[start], places[np.arange(len(start)) - begins + start + 1]


def _least_slowest(frame: Frame, costs: Costs, tables: list[_Table]) -> float:
    """Returns what the largest z is at least, whatever stands behind each stage."""
    best = np.full((len(frame.order) + 1, costs.num_units + 1), inf)
    best[0, -1] = 0.0
    for table in tables:
        slowest = np.maximum(table.bound_s, best[table.after, table.end])
        np.minimum.at(best[table.after + table.size], table.start, slowest)
    return float(best[-1, 0])


def _shortest(frame: Frame, costs: Costs, tables: list[_Table], bound: float) -> _Path | None:
    """Returns the path with the least sum of those whose stages are all within the bound."""
    limit = bound * (1 + EXACT / 2)
    best = np.full((len(frame.order) + 1, costs.num_units + 1), inf)
    best[0, -1] = 0.0
    chosen = np.zeros(best.shape, dtype=np.intp)
    for index, table in enumerate(tables):
        if not len(table.start):
            continue
        found, start = np.minimum.reduceat(_totals(table, best, limit), table.first), table.start[table.first]
        ahead = table.after + table.size
        better = found < best[ahead, start]
        best[ahead, start[better]], chosen[ahead, start[better]] = found[better], index
    if best[-1, 0] == inf:
        return None
    steps, used, at, slowest = [], len(frame.order), 0, 0.0
    while used:
        table = tables[chosen[used, at]]
        here = table.only(table.start == at)
        one = int(_totals(here, best, limit).argmin())
        last = int(here.end[one])
        steps.append((table, at, last))
        slowest = max(slowest, float(here.cost.bound_s(best[table.after, here.end])[one]))
        used, at = table.after, last
    total_s = 0.0 if frame.is_stale else float(best[-1, 0])
    return _Path(tuple(steps), total_s, slowest)


def _totals(table: _Table, best: Array, limit: float) -> Array:
    """Returns the least sums of stages with what is behind them; infinite where a stage is above the limit."""
    behind = best[table.after, table.end]
    return np.where(table.cost.bound_s(behind) <= limit, table.cost.sum_s + behind, inf)


def _draft(frame: Frame, path: _Path) -> Draft:
    count, stages = len(frame.order), []
    for table, start, end in path.steps:
        first = count - table.after - table.size
        stages.append(Stage(start, end, frame.order[first : first + table.size]))
    return Draft(frame.scene, tuple(stages), frame.samples, frame.microbatches, frame.mode, frame.is_stale)


def run(pool: Pool, scenes: list[Scene], options: Options) -> bool:
    """Solves frames exactly, the most promising first, until none can be better.

    Of models with more than `PLACES` units cuts are tried at so many places, and then anywhere in the best frames.
    """
    step = -(-max(len(scene.profile.units) for scene in scenes) // PLACES)
    is_complete = solve_frames(pool, scenes, options, partial(solve, step=step))
    if step > 1 and is_complete and not pool.found:
        return solve_frames(pool, scenes, options, solve)
    cut = [found for found in pool.ranked() if not found.draft.is_shared]
    for index, found in enumerate(cut[: options.finalists] if step > 1 else ()):
        if pool.is_over:
            return False
        frame = frame_of(found.draft, options)
        pool.report(0.7 + 0.05 * index / len(cut), f"cutting anywhere, {len(frame.order)} devices, {frame.mode}")
        draft = solve(frame, pool.costs(frame.scene, frame.samples), found.estimate.time_s)
        if draft is not None:
            pool.offer(draft)
    return is_complete
