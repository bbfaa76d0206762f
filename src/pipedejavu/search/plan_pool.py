"""The pool that all searchers fill: the best candidates with their estimates, the clock, and the score to beat."""

import time
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf

from pipedejavu.program.pipeline import assign_devices, pipelines_of
from pipedejavu.program.share import ShareSplit
from pipedejavu.search.candidate_plan import CandidatePlan, Mode, PlanningProblem, note_of
from pipedejavu.search.plan_estimate import PlanEstimate, estimate, recompute_of, shortage_of
from pipedejavu.search.plan_writer import write
from pipedejavu.search.search_options import Progress, SearchOptions
from pipedejavu.search.stage_cost import StageCosts
from pipedejavu.search.subspace import SearchSubspace

SLACK = 1.2
"""Candidates with up to this multiple of the least estimate are simulated: estimates err, most of all if transfers and
reductions share a network interface."""

TIED = 1 + 1e-6
"""Ratio of two scores that count as equal; the candidate that needs less memory is kept."""

MOST_SPLITS = 32
"""Divisions of a stage's optimizer state between device and host that are tried at most."""


@dataclass(frozen=True)
class PooledPlan:
    """A candidate, its estimate and its score."""

    candidate: CandidatePlan
    estimate: PlanEstimate
    score: float

    @property
    def merit(self) -> tuple[float, float]:
        """The sort key: the score, without the digits that depend on the order of sums, then memory."""
        return float(f"{self.score:.9g}"), self.estimate.shortage


class Pool:
    """The best candidate of each category that fits."""

    def __init__(self, options: SearchOptions, progress: Progress | None = None, max_score: float = inf):
        self.options, self.progress, self.max_score = options, progress, max_score
        self.started_s = time.monotonic()
        self.plans: dict[tuple[object, ...], PooledPlan] = {}
        self.num_estimated = 0
        self.shortage = inf
        """The least shortage of memory of all candidates so far."""
        self.tightest: CandidatePlan | None = None
        """The candidate with the least shortage."""
        self._costs: dict[tuple[int, int], StageCosts] = {}
        self._adopted: list[PlanningProblem] = []

    def again(self, max_score: float = inf) -> "Pool":
        """Returns an empty pool for another attempt at the same question, on the same clock."""
        pool = Pool(self.options, self.progress, max_score)
        pool.started_s = self.started_s
        return pool

    def costs(self, problem: PlanningProblem, samples: int) -> StageCosts:
        """Returns the stage costs of a problem for microbatches of one size."""
        key = (id(problem), samples)
        if key not in self._costs:
            self._costs[key] = StageCosts(problem, samples)
        return self._costs[key]

    def adopt(self, problem: PlanningProblem, other: PlanningProblem) -> None:
        """Uses the costs of another problem, from which this one differs only in memory."""
        self._adopted.append(problem)  # costs are known by the identity of their problem
        for (owner, samples), costs in [*self._costs.items()]:
            if owner == id(other):
                self._costs[id(problem), samples] = costs

    def estimate(self, candidate: CandidatePlan) -> PlanEstimate:
        """Returns the estimate of a candidate."""
        self.num_estimated += 1
        if candidate.is_shared:
            return _estimate_shares(candidate, self.costs(candidate.problem, candidate.samples), self.options)
        return estimate(candidate, self.costs(candidate.problem, candidate.samples))

    def offer(self, candidate: CandidatePlan, cost: PlanEstimate | None = None) -> float:
        """Keeps a candidate if it fits and is the best of its category; returns its score, or infinity."""
        cost = cost or self.estimate(candidate)
        if cost.shortage < self.shortage:
            self.shortage, self.tightest = cost.shortage, candidate
        if not cost.fits:
            return inf
        score = self.score(candidate.problem, candidate.devices, cost.time_s)
        if score > self.max_score:
            return score
        if candidate.mode.recomputes and not self.recomputes(candidate):
            candidate = replace(candidate, mode=replace(candidate.mode, recomputes=False))
        zero = max(stage.zero for stage in candidate.stages)
        if candidate.mode.zero != zero:
            candidate = replace(candidate, mode=replace(candidate.mode, zero=zero))
        key, pooled = _category_of(candidate), PooledPlan(candidate, cost, score)
        if key not in self.plans or pooled.merit < self.plans[key].merit:
            self.plans[key] = pooled
        return score

    def recomputes(self, candidate: CandidatePlan) -> bool:
        """Whether a candidate recomputes any unit; under its mode, stages that fit as they are do not."""
        costs = self.costs(candidate.problem, candidate.samples)
        return candidate.mode.recomputes and bool(recompute_of(candidate, costs).units)

    def polish(self) -> None:
        """Offers variants of the best candidates that the searchers leave out.

        Pipelines with ZeRO-1 are offered with ZeRO-3, whose estimate is the same but whose simulation is not.
        Candidates with optimizer state on the host are offered with the state of some units on the device.
        """
        divided = [pooled.candidate for pooled in self.ranked() if pooled.candidate.mode.zero == 1]
        for candidate in (c for c in divided[: self.options.candidates] if len(c.stages) > 1):
            stages = tuple(replace(stage, zero=3 * stage.zero) for stage in candidate.stages)
            self.offer(replace(candidate, stages=stages, mode=replace(candidate.mode, zero=3)))
        on_host = [pooled.candidate for pooled in self.ranked() if pooled.candidate.mode.state == "host"]
        for candidate in on_host[: self.options.candidates]:
            most = min(stage.end - stage.start for stage in candidate.stages)
            counts = sorted({most * n // MOST_SPLITS for n in range(1, MOST_SPLITS)} - {0})
            for count in counts:
                self.offer(replace(candidate, mode=replace(candidate.mode, device_pieces=count)))

    def score(self, problem: PlanningProblem, devices: tuple[str, ...], time_s: float) -> float:
        """Returns the value to minimise: the time of an update, or its price."""
        return time_s * self._rate(problem, devices)

    def limit(self, subspace: SearchSubspace) -> float:
        """Returns the score from which on a subspace's best candidate would neither be kept nor simulated."""
        categories = _categories_of(subspace)
        kept = [self.plans[category].score for category in categories if category in self.plans]
        limit = max(kept) * TIED if len(kept) == len(categories) else inf
        if kept and len(categories) > 1:  # other categories are of use only if they are about as good as the best
            limit = min(limit, SLACK * min(kept) * TIED)
        return min(self.cutoff, limit)

    def limit_s(self, subspace: SearchSubspace) -> float:
        """Returns that limit as the time of an update."""
        rate = self._rate(subspace.problem, subspace.order)
        return self.limit(subspace) / rate if rate else inf

    def _rate(self, problem: PlanningProblem, devices: tuple[str, ...]) -> float:
        """Returns the score per second: 1, or the price of the devices."""
        if self.options.objective != "price":
            return 1.0
        kinds = (problem.original.machine.device(name).kind for name in devices)
        return problem.tp_size * sum(self.options.prices.get(kind, 0.0) for kind in kinds)

    @property
    def best(self) -> float:
        """The least score so far."""
        return min((pooled.score for pooled in self.plans.values()), default=inf)

    @property
    def cutoff(self) -> float:
        """The score above which nothing would be simulated."""
        scores = sorted(pooled.score for pooled in self.plans.values())
        count = self.options.finalists
        return min(SLACK * scores[0], scores[count - 1], self.max_score) if len(scores) >= count else self.max_score

    def ranked(self) -> list[PooledPlan]:
        """Returns the candidates, the best first; ties go to fewer devices."""
        return sorted(self.plans.values(), key=lambda pooled: (pooled.score, len(pooled.candidate.devices)))

    @property
    def elapsed_s(self) -> float:
        """Time since the search began."""
        return time.monotonic() - self.started_s

    @property
    def is_over(self) -> bool:
        """Whether the time for estimates is over; a quarter of the budget is left for the simulator."""
        return self.elapsed_s > 0.75 * self.options.time_budget_s

    def report(self, share: float, text: str) -> None:
        """Reports the progress of the search."""
        if self.progress is not None:
            self.progress(min(share, 1.0), text)


_Category = tuple[object, ...]
"""What similar candidates share: only the best of a category is kept, so that the simulator sees different plans."""


def _category(note: str, mode: Mode, stages: int, devices: int, is_stale: bool, is_shared: bool = False) -> _Category:
    return note, replace(mode, device_pieces=0), is_stale, is_shared, stages, devices


def _category_of(candidate: CandidatePlan) -> _Category:
    devices = len(candidate.devices) * candidate.problem.tp_size
    if len({*candidate.degrees}) > 1:
        return candidate.mode.recomputes, devices
    return _category(
        candidate.note,
        candidate.mode,
        len(candidate.stages),
        devices,
        candidate.is_stale,
        candidate.is_shared,
    )


def _categories_of(subspace: SearchSubspace) -> set[_Category]:
    """Returns the possible categories of a subspace's best candidate, which may not need recompute or ZeRO."""
    count, problem, recomputes = len(subspace.order), subspace.problem, {False, subspace.mode.recomputes}
    devices = count * problem.tp_size
    modes = [replace(subspace.mode, recomputes=r, zero=zero) for r in recomputes for zero in subspace.zeros]
    categories: set[_Category] = {(r, devices) for r in recomputes} if len(subspace.degrees) > 1 else set()
    for degree in subspace.degrees:
        note = note_of((degree * problem.tp_size,), problem)
        counts = _counts(count, tuple(size * degree for size in subspace.sizes))
        for mode, stages in product(modes, counts):
            categories.add(_category(note, mode, stages, devices, subspace.is_stale))
    return categories


@cache
def _counts(total: int, sizes: tuple[int, ...]) -> frozenset[int]:
    """Returns the possible numbers of stages if `total` devices are divided into groups of these sizes."""
    if len(sizes) == 1:
        return frozenset() if total % sizes[0] else frozenset((total // sizes[0],))
    counts = [{0}] + [set[int]() for _ in range(total)]
    for number in range(1, total + 1):
        counts[number] = {n + 1 for size in sizes if size <= number for n in counts[number - size]}
    return frozenset(counts[total])


def _estimate_shares(candidate: CandidatePlan, costs: StageCosts, options: SearchOptions) -> PlanEstimate:
    """Returns the estimate of unequal shares of a batch, with the shares that `compile` would choose."""
    plan, machine = write(candidate, options, costs), candidate.problem.machine
    devices = candidate.devices if candidate.problem.tp_groups else assign_devices(plan, machine)
    split = ShareSplit(plan, candidate.problem.profile, machine, pipelines_of(plan), devices)
    shares, _ = split.choose()
    if not all(shares):
        return PlanEstimate(inf, {}, inf)  # a candidate with fewer devices is the same plan
    time_s, memory = split.estimate(shares).total_s, dict[str, float]()
    if candidate.cpus:
        alone, size = estimate(candidate, costs), candidate.sizes[0]
        equal = (split.total // size,) * size + (0,) * len(candidate.cpus)
        time_s, memory = alone.time_s * time_s / split.estimate(equal).total_s, alone.memory
    weights, gradients, optimizer = costs.model
    state = weights + gradients + optimizer + float(costs.saved[-1])
    memory |= dict.fromkeys(candidate.cpus or candidate.devices, state)
    return PlanEstimate(time_s, memory, shortage_of(memory, machine))
