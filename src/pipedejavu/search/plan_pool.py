"""The pool that all searchers fill: drafts that fit with their estimates, the clock, and what is worth looking at."""

import time
from dataclasses import dataclass, replace
from functools import cache
from math import inf

from pipedejavu.program.pipeline import assign_devices, pipelines_of
from pipedejavu.program.share import ShareSplit
from pipedejavu.search.candidate_plan import CandidatePlan, Mode, PlanningProblem, note_of
from pipedejavu.search.plan_estimate import PlanEstimate, estimate, recomputed_units
from pipedejavu.search.plan_writer import write
from pipedejavu.search.search_options import Progress, SearchOptions
from pipedejavu.search.stage_cost import StageCosts
from pipedejavu.search.subspace import SearchSubspace

SLACK = 1.2
"""The simulator may rank a draft first whose estimate is so many times the least: estimates err, most of all where
transfers and reductions meet on a network interface."""

TIED = 1 + 1e-6
"""Of a score, what others may have of which the one that needs less memory is kept."""

MOST_SPLITS = 32
"""Divisions of a stage's optimizer state between a device and its host that are tried."""


@dataclass(frozen=True)
class PooledPlan:
    """A draft and its estimate."""

    candidate: CandidatePlan
    estimate: PlanEstimate
    score: float

    @property
    def merit(self) -> tuple[float, float]:
        """What is least of the best: the score, without the digits that depend on the order of sums, then memory."""
        return float(f"{self.score:.9g}"), self.estimate.shortage


class Pool:
    """Drafts that fit, the best of each sort."""

    def __init__(self, options: SearchOptions, progress: Progress | None = None, most: float = inf):
        self.options, self.progress, self.most = options, progress, most
        self.started_s = time.monotonic()
        self.found: dict[tuple[object, ...], PooledPlan] = {}
        self.num_estimated = 0
        self.shortage = inf
        """The least shortage of memory of all drafts that were looked at."""
        self.tightest: CandidatePlan | None = None
        """The draft that has it."""
        self._costs: dict[tuple[int, int], StageCosts] = {}

    def costs(self, problem: PlanningProblem, samples: int) -> StageCosts:
        """Returns the costs of a scene for microbatches of one size."""
        key = (id(problem), samples)
        if key not in self._costs:
            self._costs[key] = StageCosts(problem, samples)
        return self._costs[key]

    def estimate(self, candidate: CandidatePlan) -> PlanEstimate:
        """Returns what a draft costs."""
        self.num_estimated += 1
        if candidate.is_shared:
            return _estimate_shares(candidate, self.costs(candidate.problem, candidate.samples), self.options)
        return estimate(candidate, self.costs(candidate.problem, candidate.samples))

    def offer(self, candidate: CandidatePlan, cost: PlanEstimate | None = None) -> float:
        """Keeps a draft that fits and is the best of its sort; returns its score, infinite where it does not fit."""
        cost = cost or self.estimate(candidate)
        if cost.shortage < self.shortage:
            self.shortage, self.tightest = cost.shortage, candidate
        if not cost.fits:
            return inf
        score = self.score(candidate.problem, candidate.devices, cost.time_s)
        if score > self.most:
            return score
        if candidate.mode.recomputes and not recomputed_units(
            candidate, self.costs(candidate.problem, candidate.samples)
        ):
            candidate = replace(candidate, mode=replace(candidate.mode, recomputes=False))
        zero = max(stage.zero for stage in candidate.stages)
        if candidate.mode.zero != zero:
            candidate = replace(candidate, mode=replace(candidate.mode, zero=zero))
        key, found = _sort_of(candidate), PooledPlan(candidate, cost, score)
        if key not in self.found or found.merit < self.found[key].merit:
            self.found[key] = found
        return score

    def polish(self) -> None:
        """Tries more of the best drafts: some optimizer state on the device where it is kept on the host.

        And ZeRO-3 where a pipeline has ZeRO-1: only by the estimate it takes as long.
        """
        divided = [found.candidate for found in self.ranked() if found.candidate.mode.zero == 1]
        for candidate in (d for d in divided[: self.options.candidates] if len(d.stages) > 1):
            stages = tuple(replace(stage, zero=3 * stage.zero) for stage in candidate.stages)
            self.offer(replace(candidate, stages=stages, mode=replace(candidate.mode, zero=3)))
        on_host = [found.candidate for found in self.ranked() if found.candidate.mode.state == "host"]
        for candidate in on_host[: self.options.candidates]:
            most = min(stage.end - stage.start for stage in candidate.stages)
            counts = sorted({most * n // MOST_SPLITS for n in range(1, MOST_SPLITS)} - {0})
            for count in counts:
                self.offer(replace(candidate, mode=replace(candidate.mode, device_pieces=count)))

    def score(self, problem: PlanningProblem, devices: tuple[str, ...], time_s: float) -> float:
        """Returns what is to be least: the time of an update, or its price."""
        return time_s * self._rate(problem, devices)

    def limit(self, subspace: SearchSubspace) -> float:
        """Returns the score from which on a frame's best draft would neither be kept nor simulated."""
        sorts = _sorts_of(subspace)
        kept = [self.found[sort].score for sort in sorts if sort in self.found]
        limit = max(kept) * TIED if len(kept) == len(sorts) else inf
        if kept and len(sorts) > 1:  # sorts that are worse, or were not found, are of use where they are about as good
            limit = min(limit, SLACK * min(kept) * TIED)
        return min(self.cutoff, limit)

    def limit_s(self, subspace: SearchSubspace) -> float:
        """Returns that limit as a time."""
        rate = self._rate(subspace.problem, subspace.order)
        return self.limit(subspace) / rate if rate else inf

    def _rate(self, problem: PlanningProblem, devices: tuple[str, ...]) -> float:
        if self.options.objective != "price":
            return 1.0
        kinds = (problem.asked.machine.device(name).kind for name in devices)
        return problem.team_size * sum(self.options.prices.get(kind, 0.0) for kind in kinds)

    @property
    def best(self) -> float:
        """The least score so far."""
        return min((found.score for found in self.found.values()), default=inf)

    @property
    def cutoff(self) -> float:
        """Returns the score beyond which nothing would be simulated."""
        scores = sorted(found.score for found in self.found.values())
        count = self.options.finalists
        return min(SLACK * scores[0], scores[count - 1], self.most) if len(scores) >= count else self.most

    def ranked(self) -> list[PooledPlan]:
        """Returns what was found, best first."""
        return sorted(self.found.values(), key=lambda found: (found.score, len(found.candidate.devices)))

    @property
    def elapsed_s(self) -> float:
        """Time since the search began."""
        return time.monotonic() - self.started_s

    @property
    def is_over(self) -> bool:
        """Whether the time for estimates is over; a quarter of the budget is left for the simulator."""
        return self.elapsed_s > 0.75 * self.options.time_budget_s

    def report(self, share: float, text: str) -> None:
        """Tells how far the search is."""
        if self.progress is not None:
            self.progress(min(share, 1.0), text)


_Sort = tuple[object, ...]
"""What drafts have in common of which only the best is kept; others would take its place in the simulator."""


def _sort(note: str, mode: Mode, stages: int, devices: int, is_stale: bool, is_shared: bool = False) -> _Sort:
    return note, replace(mode, device_pieces=0), is_stale, is_shared, stages, devices


def _sort_of(candidate: CandidatePlan) -> _Sort:
    devices = len(candidate.devices) * candidate.problem.team_size
    if len({*candidate.degrees}) > 1:
        return candidate.mode.recomputes, devices
    return _sort(
        candidate.note,
        candidate.mode,
        len(candidate.stages),
        devices,
        candidate.is_stale,
        candidate.is_shared,
    )


def _sorts_of(subspace: SearchSubspace) -> set[_Sort]:
    """Returns the sorts of which a frame's best draft may be: it may have nothing to compute again, or to divide."""
    count, problem, again = len(subspace.order), subspace.problem, {False, subspace.mode.recomputes}
    devices = count * problem.team_size
    modes = [replace(subspace.mode, recomputes=r, zero=zero) for r in again for zero in subspace.zeros]
    found: set[_Sort] = {(r, devices) for r in again} if len(subspace.degrees) > 1 else set()
    for degree in subspace.degrees:
        note = note_of((degree * problem.team_size,), problem)
        counts = _counts(count, tuple(size * degree for size in subspace.sizes))
        found |= {_sort(note, mode, stages, devices, subspace.is_stale) for mode in modes for stages in counts}
    return found


@cache
def _counts(total: int, sizes: tuple[int, ...]) -> frozenset[int]:
    """Returns of how many stages, of these sizes, so many devices can be."""
    if len(sizes) == 1:
        return frozenset() if total % sizes[0] else frozenset((total // sizes[0],))
    found = [{0}] + [set[int]() for _ in range(total)]
    for number in range(1, total + 1):
        found[number] = {n + 1 for size in sizes if size <= number for n in found[number - size]}
    return frozenset(found[total])


def _estimate_shares(candidate: CandidatePlan, costs: StageCosts, options: SearchOptions) -> PlanEstimate:
    """Returns what unequal shares of a batch cost, by the shares that `compile` will give."""
    plan, machine = write(candidate, options, costs), candidate.problem.machine
    devices = candidate.devices if candidate.problem.tp_groups else assign_devices(plan, machine)
    split = ShareSplit(plan, candidate.problem.profile, machine, pipelines_of(plan), devices)
    shares, _ = split.choose()
    if not all(shares):
        return PlanEstimate(inf, {}, inf)  # a plan for fewer devices says the same
    time_s, memory = split.estimate(shares).total_s, dict[str, float]()
    if candidate.cpus:
        alone, size = estimate(candidate, costs), candidate.sizes[0]
        equal = (split.total // size,) * size + (0,) * len(candidate.cpus)
        time_s, memory = alone.time_s * time_s / split.estimate(equal).total_s, alone.memory
    state = float(costs.weights[-1] + costs.gradients[-1] + costs.optimizer[-1] + costs.saved[-1])
    memory |= dict.fromkeys(candidate.cpus or candidate.devices, state)
    rooms = {name: machine.device(name).memory_bytes - machine.device(name).reserved_bytes for name in memory}
    return PlanEstimate(time_s, memory, max(memory[name] / max(rooms[name], 1) for name in memory))
