"""The exact searcher of chains: dynamic programming over suffixes of units and of devices.

The cost is Σ a + max z over stages. Under a bound on z the least Σ a is a shortest path, from the last stage to the
first, as z only grows with the sum behind a stage. A better plan than the best so far must have its z below best − Σ a,
which is the next bound. So every bound rules out all that lies above it, and the loop ends with the optimum.
What a stage costs depends on the devices behind it and on the workers that they are: these two are the states.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from math import inf

import numpy as np
from numpy.typing import NDArray

from pipedejavu.search.branch_and_bound import branch_and_bound
from pipedejavu.search.candidate_plan import Array, CandidatePlan, PlanningProblem, Stage
from pipedejavu.search.plan_pool import Pool
from pipedejavu.search.search_options import SearchOptions
from pipedejavu.search.slot import ScheduledSlot, slot_of
from pipedejavu.search.stage_cost import StageCost, StageCosts, Sums
from pipedejavu.search.subspace import SearchSubspace, subspace_of

PLACES = 128
"""For cuts in every frame; where there are more, only every second or third is looked at."""
EXACT = 1e-10
"""Parts of a time that do not count."""


FIRST, LAST = 0, 1
"""States: nothing stands behind a stage, and nothing before."""


@dataclass(frozen=True)
class _Stages:
    """Stages that fit, and what they cost: pairs of a start and an end, sorted by starts."""

    start: NDArray[np.intp]
    end: NDArray[np.intp]
    zero: NDArray[np.intp]
    cost: StageCost

    @cached_property
    def first(self) -> NDArray[np.intp]:
        """Where the pairs of another start begin."""
        return np.flatnonzero(np.diff(self.start, prepend=-1))

    @cached_property
    def bound_s(self) -> Array:
        """What each adds at least once its first microbatch is through."""
        return self.cost.bound_s(0.0)

    @cached_property
    def longest(self) -> int:
        """The most units that one has."""
        return int((self.end - self.start).max(initial=0))

    def only(self, chosen: NDArray[np.bool_]) -> "_Stages":
        """Returns some of them."""
        cost = StageCost(self.cost.slot, *(column[chosen] for column in self.cost[1:]))
        return _Stages(self.start[chosen], self.end[chosen], self.zero[chosen], cost)


@dataclass(frozen=True)
class _Table:
    """Stages of one group; for stages that may divide their state there may be two."""

    behind: int
    """The state of what stands behind them; `ahead` is that with them."""
    ahead: int
    group: tuple[str, ...]
    shards: int
    found: _Stages

    def within(self, bound: float) -> "_Table":
        """Returns the table without stages that are above a bound whatever stands behind them."""
        return replace(self, found=self.found.only(self.found.bound_s <= bound))

    def totals(self, best: Array, limit: float) -> Array:
        """Returns the least sums of stages with what is behind them; infinite where a stage is above the limit."""
        behind, cost = best[self.behind, self.found.end], self.found.cost
        return np.where(cost.bound_s(behind) <= limit, cost.sum_s + behind, inf)


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


def solve(subspace: SearchSubspace, costs: StageCosts, limit_s: float = inf, step: int = 1) -> CandidatePlan | None:
    """Returns the best draft of a frame that fits and takes less than `limit_s`; None where there is none.

    Of a model with many units it is found sooner among the cuts behind every `step`-th one.
    """
    tables = _tables(subspace, costs, limit_s, step)
    least = _least_slowest(costs, tables)
    best, bound, probe = None, inf, least
    while bound >= least and least < limit_s:
        found = _shortest(subspace, costs, tables, bound)
        if found is None:
            break
        if found.time_s < limit_s:
            best, limit_s = found, found.time_s
        if found.sum_s + least >= limit_s * (1 - EXACT):
            break
        # Bounds would come down by little where many plans have the same sum: so one far below is tried, too.
        lower = _shortest(subspace, costs, tables, probe)
        if lower is None:
            least = probe
        elif lower.time_s < limit_s:
            best, limit_s = lower, lower.time_s
        bound = (limit_s - found.sum_s) * (1 - EXACT)
        probe = (least + bound) / 2
        tables = [table.within(bound) for table in tables]
    return None if best is None else _draft(subspace, costs, best)


def _tables(subspace: SearchSubspace, costs: StageCosts, limit_s: float, step: int) -> list[_Table]:
    """Returns the stages that may stand before others in a pipeline that takes less than a time, those last first.

    There are none where all of them together would be too short.
    """
    count, tables, are_alike, length = len(subspace.order), list[_Table](), _are_alike(subspace), 0
    sums: dict[object, tuple[NDArray[np.intp], NDArray[np.intp], Sums]] = {}
    known: dict[object, list[_Stages]] = {}
    states: dict[int, dict[int, int]] = {0: {0: FIRST}, count: {0: LAST}}
    number = LAST
    for after in range(count):
        for (workers, behind), (size, shards) in product(states.get(after, {}).items(), subspace.groups(after)):
            place, used = subspace.row.place(after, size, shards), after + size * shards
            slot = slot_of(place, subspace.microbatches, subspace.is_stale, 0, workers)
            ends = (after == 0, used == count)  # the last stage ends with the model, the first begins with it
            alike, key = (place.kinds, place.cpu, slot.share, ends), (slot.live, place.likeness(), ends)
            if alike not in sums:
                start, end = _pairs(slot, costs, limit_s, step, *ends)
                sums[alike] = start, end, costs.add_up(start, end, place, subspace.mode)
            if key not in known:
                known[key] = _choose(subspace, costs, slot, *sums[alike])
            ahead = states.setdefault(used, {}).setdefault(0 if used == count else workers + size, number + 1)
            number = max(number, ahead)
            group = subspace.order[count - used : count - after]
            tables += [_Table(behind, ahead, group, shards, found) for found in known[key]]
            if are_alike:
                longest = max(found.longest for found in known[key])
                length += longest
                # The more devices are behind a stage the more it holds, so that none before this one is longer.
                if after and length + longest * ((count - used) // size) < costs.num_units:
                    return []
    return tables


def _are_alike(subspace: SearchSubspace) -> bool:
    """Whether stages differ in nothing that memory depends on but in how many are behind them."""
    if subspace.is_free:
        return False
    size = subspace.sizes[0]
    places = (subspace.row.place(after, size) for after in range(0, len(subspace.order), size))
    return len({(p.kinds, p.room_bytes, p.host_room_bytes) for p in places}) == 1


def _choose(
    subspace: SearchSubspace,
    costs: StageCosts,
    slot: ScheduledSlot,
    start: NDArray[np.intp],
    end: NDArray[np.intp],
    sums: Sums,
) -> list[_Stages]:
    """Returns the stages that fit, each with the ZeRO stage that is best for it; where neither is, with both."""
    place, found = slot.place, list[tuple[_Stages, NDArray[np.bool_]]]()
    for zero in subspace.zeros if len(place.group) > 1 else (0,):
        cost = costs.stage(start, end, slot._replace(zero=zero), subspace.mode, sums)
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
    best = _Stages(start, end, np.where(divides, divided.zero, whole.zero), StageCost(slot, *columns))
    either = divided_fits & whole_fits & ~is_no_slower & ~is_no_faster
    return [best.only(divided_fits | whole_fits), *([divided.only(either)] if either.any() else [])]


def _pairs(
    slot: ScheduledSlot, costs: StageCosts, limit_s: float, step: int, is_last: bool, is_first: bool
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Returns where stages begin and end whose work alone is not too much: most are too long for a good pipeline."""
    units = costs.num_units
    places = np.array([*range(0, units, step), units])
    starts = np.arange(1 if is_first else len(places) - 1)
    most = np.full_like(starts, len(places) - 1)
    for kind in slot.place.kinds if slot.share > 1 and limit_s < inf else ():
        work = (costs.times(kind)[0] + costs.times(kind)[1])[places]
        longest = work[starts] + limit_s * (1 + EXACT) / (slot.share - 1)
        most = np.minimum(most, np.searchsorted(work, longest * (1 + EXACT), side="right") - 1)
    if is_last:
        starts = places[starts[most == len(places) - 1]]
        return starts, np.full_like(starts, units)
    counts = most - starts
    begins = np.repeat(np.cumsum(counts) - counts, counts)
    start = np.repeat(starts, counts)
    return places[start], places[np.arange(len(start)) - begins + start + 1]


def _least_slowest(costs: StageCosts, tables: list[_Table]) -> float:
    """Returns what the largest z is at least, whatever stands behind each stage."""
    best = _unreached(costs, tables)
    for table in tables:
        slowest = np.maximum(table.found.bound_s, best[table.behind, table.found.end])
        np.minimum.at(best[table.ahead], table.found.start, slowest)
    return float(best[LAST, 0])


def _unreached(costs: StageCosts, tables: list[_Table]) -> Array:
    """Returns what there is to add to: for each state and each first unit of it, nothing, or that it is not reached."""
    best = np.full((max((table.ahead for table in tables), default=LAST) + 1, costs.num_units + 1), inf)
    best[FIRST, -1] = 0.0
    return best


def _shortest(subspace: SearchSubspace, costs: StageCosts, tables: list[_Table], bound: float) -> _Path | None:
    """Returns the path with the least sum of those whose stages are all within the bound."""
    limit = bound * (1 + EXACT / 2)
    best = _unreached(costs, tables)
    chosen = np.zeros(best.shape, dtype=np.intp)
    for index, table in enumerate(tables):
        first, ahead = table.found.first, table.ahead
        if not len(first):
            continue
        found, start = np.minimum.reduceat(table.totals(best, limit), first), table.found.start[first]
        better = found < best[ahead, start]
        best[ahead, start[better]], chosen[ahead, start[better]] = found[better], index
    if best[LAST, 0] == inf:
        return None
    steps, state, at, slowest = list[tuple[_Table, int]](), LAST, 0, 0.0
    while state != FIRST:
        table = tables[chosen[state, at]]
        here = replace(table, found=table.found.only(table.found.start == at))
        one = int(here.totals(best, limit).argmin())
        steps.append((here, one))
        at = int(here.found.end[one])
        slowest = max(slowest, float(here.found.cost.bound_s(best[table.behind, at])[one]))
        state = table.behind
    total_s = 0.0 if subspace.is_stale else float(best[LAST, 0])
    return _Path(tuple(steps), total_s, slowest)


def _draft(subspace: SearchSubspace, costs: StageCosts, path: _Path) -> CandidatePlan:
    """Returns the draft of a path, with state whole wherever dividing it saves no time."""
    stages, behind_s = list[Stage](), 0.0
    for table, at in reversed(path.steps):
        found = table.found
        start, end, zero, cost = int(found.start[at]), int(found.end[at]), int(found.zero[at]), found.cost
        sum_s = float(cost.sum_s[at])
        if zero and 0 in subspace.zeros:
            place, whole = cost.slot.place, costs.stage(start, end, cost.slot._replace(zero=0), subspace.mode)
            fits = whole.device_bytes <= place.room_bytes and whole.host_bytes <= place.host_room_bytes
            if fits and whole.sum_s <= sum_s and whole.bound_s(behind_s) <= path.slowest_s:
                zero = 0
        behind_s += sum_s
        stages.insert(0, Stage(start, end, table.group, table.shards, zero))
    return CandidatePlan(
        subspace.problem, tuple(stages), subspace.samples, subspace.microbatches, subspace.mode, subspace.is_stale
    )


def run(pool: Pool, problems: list[PlanningProblem], options: SearchOptions) -> bool:
    """Solves frames exactly, the most promising first, until none can be better.

    Of models with more than `PLACES` units cuts are tried at so many places, and then anywhere in the best frames.
    """
    step = -(-max(len(problem.profile.units) for problem in problems) // PLACES)
    is_complete = branch_and_bound(pool, problems, options, partial(solve, step=step))
    if step > 1 and is_complete and not pool.found:
        return branch_and_bound(pool, problems, options, solve)
    cut = [found for found in pool.ranked() if not found.candidate.is_shared]
    for index, found in enumerate(cut[: options.finalists] if step > 1 else ()):
        if pool.is_over:
            return False
        subspace = subspace_of(found.candidate, options)
        pool.report(0.7 + 0.05 * index / len(cut), f"cutting anywhere, {len(subspace.order)} devices, {subspace.mode}")
        candidate = solve(subspace, pool.costs(subspace.problem, subspace.samples), found.estimate.time_s)
        if candidate is not None:
            pool.offer(candidate)
    return is_complete
