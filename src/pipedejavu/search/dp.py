"""The exact searcher for chains: dynamic programming over suffixes of units and of devices.

The cost is Σ a + max z over stages. Under an upper bound on z, the least Σ a is a shortest path from the last stage to
the first, as z only grows with the sum over the later stages. A plan that beats the best so far must have z below
best − Σ a, which becomes the next bound. Each bound rules out all plans above it, and the loop ends with the optimum.
The cost of a stage depends on the number of devices and of workers after it: this pair is the state.
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
from pipedejavu.search.slot import ScheduledSlot, schedule_slot
from pipedejavu.search.stage_cost import StageCost, StageCosts
from pipedejavu.search.stage_sums import Positions, StageSums
from pipedejavu.search.subspace import SearchSubspace, subspace_of

MOST_CUTS = 128
"""Cut positions tried in every subspace; in a model with more units, only every second or third boundary is tried."""
EXACT = 1e-10
"""Relative difference of times that counts as equal."""


EMPTY, COMPLETE = 0, 1
"""States: no stage is chosen yet, and the chosen stages take all devices."""


@dataclass(frozen=True)
class _Stages:
    """Stages that fit, and their costs: pairs of a start and an end, sorted by start."""

    start: Positions
    end: Positions
    zero: Positions
    cost: StageCost

    @cached_property
    def first(self) -> Positions:
        """Positions at which the pairs of each start begin."""
        return np.flatnonzero(np.diff(self.start, prepend=-1))

    @cached_property
    def least_remaining_s(self) -> Array:
        """Lower bounds of z, for any later stages."""
        return self.cost.remaining_s(0.0)

    @cached_property
    def longest(self) -> int:
        """Units of the longest stage."""
        return int((self.end - self.start).max(initial=0))

    def only(self, chosen: NDArray[np.bool_]) -> "_Stages":
        """Returns the chosen stages."""
        cost = StageCost(self.cost.scheduled, *(column[chosen] for column in self.cost[1:]))
        return _Stages(self.start[chosen], self.end[chosen], self.zero[chosen], cost)


@dataclass(frozen=True)
class _SlotStages:
    """The stages of one slot; a slot whose stages may divide their state can have two such tables."""

    suffix: int
    """State of the stages after these."""
    extended: int
    """State with these stages in front of the suffix."""
    group: tuple[str, ...]
    shards: int
    stages: _Stages

    def within(self, bound: float) -> "_SlotStages":
        """Returns the table without stages whose z is above a bound for any later stages."""
        return replace(self, stages=self.stages.only(self.stages.least_remaining_s <= bound))

    def totals(self, best: Array, limit: float) -> Array:
        """Returns the least sums of stages and their suffixes; infinite for stages whose z is above the limit."""
        later, cost = best[self.suffix, self.stages.end], self.stages.cost
        return np.where(cost.remaining_s(later) <= limit, cost.sum_s + later, inf)


@dataclass(frozen=True)
class _Path:
    """A cut of all units."""

    steps: tuple[tuple[_SlotStages, int], ...]
    """For each stage, from the first on, its table and its position there."""
    sum_s: float
    slowest_s: float

    @property
    def time_s(self) -> float:
        """Estimated time of an update."""
        return self.sum_s + self.slowest_s


def solve(subspace: SearchSubspace, costs: StageCosts, limit_s: float = inf, step: int = 1) -> CandidatePlan | None:
    """Returns the best candidate of a subspace that fits and takes less than `limit_s`, or None.

    With a `step` above 1 it cuts only after every `step`-th unit, which is faster for models with many units.
    """
    tables = _tables(subspace, costs, limit_s, step)
    least = _least_slowest(costs, tables)
    best, bound, probe = None, inf, least
    while bound >= least and least < limit_s:
        path = _shortest(subspace, costs, tables, bound)
        if path is None:
            break
        if path.time_s < limit_s:
            best, limit_s = path, path.time_s
        if path.sum_s + least >= limit_s * (1 - EXACT):
            break
        # If many plans have the same sum the bound comes down slowly, so a much lower one is probed, too.
        lower = _shortest(subspace, costs, tables, probe)
        if lower is None:
            least = probe
        elif lower.time_s < limit_s:
            best, limit_s = lower, lower.time_s
        # A difference of nearly equal numbers has the rounding of both, so it comes down by a share of the time itself.
        bound = limit_s * (1 - EXACT) - path.sum_s
        probe = (least + bound) / 2
        tables = [table.within(bound) for table in tables]
    return None if best is None else _candidate(subspace, costs, best)


def _tables(subspace: SearchSubspace, costs: StageCosts, limit_s: float, step: int) -> list[_SlotStages]:
    """Returns the stages of pipelines that take less than `limit_s`, in the order of their slots from the last on.

    The list is empty if the longest stages together do not hold all units.
    """
    count, tables, has_equal_slots, length = len(subspace.order), list[_SlotStages](), _has_equal_slots(subspace), 0
    sums: dict[object, tuple[Positions, Positions, StageSums]] = {}
    fitting: dict[object, list[_Stages]] = {}
    states: dict[int, dict[int, int]] = {0: {0: EMPTY}, count: {0: COMPLETE}}
    number = COMPLETE
    for after in range(count):
        for (workers, suffix), (size, shards) in product(states.get(after, {}).items(), subspace.groups(after)):
            slot, used = subspace.device_order.slot(after, size, shards), after + size * shards
            scheduled = schedule_slot(slot, subspace.microbatches, subspace.is_stale, 0, workers)
            ends = (after == 0, used == count)  # the last stage ends with the model, the first begins with it
            sums_key = (slot.kinds, slot.host.cpu, scheduled.microbatches, ends)
            key = (scheduled.live, slot.cost_key(), ends)
            if sums_key not in sums:
                start, end = _pairs(scheduled, costs, limit_s, step, *ends)
                sums[sums_key] = start, end, costs.add_up(start, end, slot, subspace.mode)
            if key not in fitting:
                fitting[key] = _choose(subspace, costs, scheduled, *sums[sums_key])
            extended = states.setdefault(used, {}).setdefault(0 if used == count else workers + size, number + 1)
            number = max(number, extended)
            group = subspace.order[count - used : count - after]
            tables += [_SlotStages(suffix, extended, group, shards, stages) for stages in fitting[key]]
            if has_equal_slots:
                longest = max(stages.longest for stages in fitting[key])
                length += longest
                # The more devices follow a stage the more it holds, so no earlier stage is longer than this one.
                if after and length + longest * ((count - used) // size) < costs.num_units:
                    return []
    return tables


def _has_equal_slots(subspace: SearchSubspace) -> bool:
    """Whether all slots have devices of the same kinds and the same memory."""
    if subspace.is_free:
        return False
    size = subspace.sizes[0]
    slots = (subspace.device_order.slot(after, size) for after in range(0, len(subspace.order), size))
    return len({(slot.kinds, slot.memory) for slot in slots}) == 1


def _choose(
    subspace: SearchSubspace,
    costs: StageCosts,
    scheduled: ScheduledSlot,
    start: Positions,
    end: Positions,
    sums: StageSums,
) -> list[_Stages]:
    """Returns the stages that fit, each with its better ZeRO stage; with both if neither is better in all respects."""
    options = list[_Stages]()
    for zero in subspace.zeros if len(scheduled.slot.group) > 1 else (0,):
        cost = costs.stage(start, end, scheduled._replace(zero=zero), subspace.mode, sums)
        options.append(_Stages(start, end, np.full_like(start, zero), cost))
    if len(options) == 1:
        return [options[0].only(options[0].cost.fits)]
    whole, divided = options
    whole_fits, divided_fits = whole.cost.fits, divided.cost.fits
    pairs = [*zip(divided.cost[1:4], whole.cost[1:4], strict=True)]
    is_no_slower = np.logical_and.reduce([one <= other for one, other in pairs])
    is_no_faster = np.logical_and.reduce([one >= other for one, other in pairs])
    divides = divided_fits & (is_no_slower | ~whole_fits)
    columns = (np.where(divides, one, other) for one, other in zip(divided.cost[1:], whole.cost[1:], strict=True))
    best = _Stages(start, end, np.where(divides, divided.zero, whole.zero), StageCost(scheduled, *columns))
    either = divided_fits & whole_fits & ~is_no_slower & ~is_no_faster
    return [best.only(divided_fits | whole_fits), *([divided.only(either)] if either.any() else [])]


def _pairs(
    scheduled: ScheduledSlot, costs: StageCosts, limit_s: float, step: int, is_last: bool, is_first: bool
) -> tuple[Positions, Positions]:
    """Returns the starts and ends of stages whose compute alone stays within `limit_s`: most stages do not."""
    units = costs.num_units
    cuts = np.array([*range(0, units, step), units])
    starts = np.arange(1 if is_first else len(cuts) - 1)
    most = np.full_like(starts, len(cuts) - 1)
    for kind in scheduled.slot.kinds if scheduled.microbatches > 1 and limit_s < inf else ():
        work = (costs.times(kind)[0] + costs.times(kind)[1])[cuts]
        longest = work[starts] + limit_s * (1 + EXACT) / (scheduled.microbatches - 1)
        most = np.minimum(most, np.searchsorted(work, longest * (1 + EXACT), side="right") - 1)
    if is_last:
        starts = cuts[starts[most == len(cuts) - 1]]
        return starts, np.full_like(starts, units)
    counts = most - starts
    begins = np.repeat(np.cumsum(counts) - counts, counts)
    start = np.repeat(starts, counts)
    return cuts[start], cuts[np.arange(len(start)) - begins + start + 1]


def _least_slowest(costs: StageCosts, tables: list[_SlotStages]) -> float:
    """Returns a lower bound of the largest z of any cut."""
    best = _unreached(costs, tables)
    for table in tables:
        slowest = np.maximum(table.stages.least_remaining_s, best[table.suffix, table.stages.end])
        np.minimum.at(best[table.extended], table.stages.start, slowest)
    return float(best[COMPLETE, 0])


def _unreached(costs: StageCosts, tables: list[_SlotStages]) -> Array:
    """Returns the initial values by state and first unit: 0 for the empty suffix, infinity elsewhere."""
    best = np.full((max((table.extended for table in tables), default=COMPLETE) + 1, costs.num_units + 1), inf)
    best[EMPTY, -1] = 0.0
    return best


def _shortest(subspace: SearchSubspace, costs: StageCosts, tables: list[_SlotStages], bound: float) -> _Path | None:
    """Returns the path with the least sum among those whose stages all have z within the bound, or None."""
    limit = bound * (1 + EXACT / 2)
    best = _unreached(costs, tables)
    chosen = np.zeros(best.shape, dtype=np.intp)
    for index, table in enumerate(tables):
        first, state = table.stages.first, table.extended
        if not len(first):
            continue
        sums, start = np.minimum.reduceat(table.totals(best, limit), first), table.stages.start[first]
        better = sums < best[state, start]
        best[state, start[better]], chosen[state, start[better]] = sums[better], index
    if best[COMPLETE, 0] == inf:
        return None
    steps, state, unit, slowest = list[tuple[_SlotStages, int]](), COMPLETE, 0, 0.0
    while state != EMPTY:
        table = tables[chosen[state, unit]]
        here = replace(table, stages=table.stages.only(table.stages.start == unit))
        at = int(here.totals(best, limit).argmin())
        steps.append((here, at))
        unit = int(here.stages.end[at])
        slowest = max(slowest, float(here.stages.cost.remaining_s(best[table.suffix, unit])[at]))
        state = table.suffix
    total_s = 0.0 if subspace.is_stale else float(best[COMPLETE, 0])
    return _Path(tuple(steps), total_s, slowest)


def _candidate(subspace: SearchSubspace, costs: StageCosts, path: _Path) -> CandidatePlan:
    """Returns the candidate plan of a path; state is divided only if that saves time or memory that is needed."""
    stages, later_s = list[Stage](), 0.0
    for table, at in reversed(path.steps):
        start, end, zero = (int(column[at]) for column in (table.stages.start, table.stages.end, table.stages.zero))
        cost = table.stages.cost
        sum_s = float(cost.sum_s[at])
        if zero and 0 in subspace.zeros:
            whole = costs.stage(start, end, cost.scheduled._replace(zero=0), subspace.mode)
            if whole.fits and whole.sum_s <= sum_s and whole.remaining_s(later_s) <= path.slowest_s:
                zero = 0
        later_s += sum_s
        stages.insert(0, Stage(start, end, table.group, table.shards, zero))
    return CandidatePlan(
        subspace.problem, tuple(stages), subspace.samples, subspace.microbatches, subspace.mode, subspace.is_stale
    )


def run(pool: Pool, problems: list[PlanningProblem], options: SearchOptions) -> bool:
    """Solves subspaces exactly, the least lower bound first, until none can be better; returns whether it got there.

    Models with more than `MOST_CUTS` units are first cut at that many positions, and then anywhere in the best
    subspaces.
    """
    step = -(-max(len(problem.profile.units) for problem in problems) // MOST_CUTS)
    is_complete = branch_and_bound(pool, problems, options, partial(solve, step=step))
    if step > 1 and is_complete and not pool.plans:
        return branch_and_bound(pool, problems, options, solve)
    pipelines = [pooled for pooled in pool.ranked() if not pooled.candidate.is_shared]
    for index, pooled in enumerate(pipelines[: options.finalists] if step > 1 else ()):
        if pool.is_over:
            return False
        subspace = subspace_of(pooled.candidate, options)
        share = 0.7 + 0.05 * index / len(pipelines)
        pool.report(share, f"cutting anywhere, {len(subspace.order)} devices, {subspace.mode}")
        candidate = solve(subspace, pool.costs(subspace.problem, subspace.samples), pooled.estimate.time_s)
        if candidate is not None:
            pool.offer(candidate)
    return is_complete
