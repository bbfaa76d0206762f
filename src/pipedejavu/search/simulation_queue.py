"""The queue of plans that wait for the simulator: the most promising is simulated first, most never are."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from pipedejavu.plan import Plan
from pipedejavu.search.candidate_plan import PlanningProblem, Stage
from pipedejavu.search.correction_choice import corrected, is_corrected, least_loss_first
from pipedejavu.search.lower_bound import lower_bound_s
from pipedejavu.search.memory_repair import repaired
from pipedejavu.search.neighbour import neighbours
from pipedejavu.search.plan_pool import SLACK, Pool, PooledPlan
from pipedejavu.search.plan_writer import other_orders, stashed, why_not_run, write
from pipedejavu.search.ranking import DIVIDED_NEAR, NEAR, Timed, admit, faster_form, price_of, time_plan
from pipedejavu.search.search_options import SearchOptions
from pipedejavu.search.search_result import RankedPlan

MOST_REPAIRS = 3
"""Times that a plan is cut again for the memory that its simulation found missing."""
MOST_POLISHES, MOST_NEIGHBOURS = 4, 6
"""Times that the fastest plan is compared with its neighbours, and neighbours that are simulated at most each time."""


class Ranked(NamedTuple):
    """All plans that fit, the best first, and how many were simulated."""

    candidates: list[RankedPlan]
    num_simulated: int
    notes: list[str]


class _Waiting(NamedTuple):
    """A plan in the queue: with a lower bound of its value, or with its simulated time."""

    value: float
    """The value to minimise: simulated, or a lower bound before that."""
    is_timed: bool
    number: int
    plan: Plan
    pooled: PooledPlan
    timed: Timed | None = None
    repairs: int = 0
    """Times that its candidate was cut again for less memory."""

    def known(self, timed: Timed, options: SearchOptions) -> "_Waiting":
        """Returns the item with its simulated time."""
        return self._replace(value=value_of(timed, options), is_timed=True, timed=timed)


class SimulationQueue:
    """Simulates the plans of a pool and admits the fastest.

    `real` maps the problems of the pool to those to simulate on, which differ if another memory was planned for.
    """

    def __init__(self, pool: Pool, options: SearchOptions, real: dict[int, PlanningProblem]):
        self.pool, self.options, self.real = pool, options, real
        self.candidates: list[RankedPlan] = []
        self.notes: list[str] = []
        self.num_simulated = self._number = 0
        self._tried: set[str] = set()
        self._waiting: list[_Waiting] = []
        self._origins: dict[int, PooledPlan] = {}
        """What each admitted plan was written from, by identity."""
        self._polished: list[tuple[Stage, ...]] = []

    def rank(self, rounds: int | None = None) -> Ranked:
        """Simulates until there are enough plans and no other can be faster.

        The first plan is simulated, or admitted if it was simulated before. A plan whose lower bound is above all
        admitted ones is never simulated. If no plan is admitted the next candidates follow, at most for some `rounds`.
        """
        pooled_plans = self.pool.ranked()
        while pooled_plans and not self.candidates and rounds != 0:
            rounds = None if rounds is None else rounds - 1
            self._waiting, before = [], self.num_simulated
            while pooled_plans and len(self._waiting) < self.options.finalists:
                self._waiting += self._plans(pooled_plans.pop(0))
            number = len(self._waiting)
            heapify(self._waiting)
            while self._waiting:
                item = heappop(self._waiting)
                if len(self.candidates) >= self.options.candidates and item.value > NEAR * self._best:
                    break
                if item.timed is not None:
                    self._admit(item, item.timed)
                elif self.num_simulated == before or self.pool.elapsed_s < self.options.time_budget_s:
                    done = min(1.0, (self.num_simulated - before) / number)
                    self.pool.report(0.75 + 0.25 * done, f"simulating {item.plan.name}")
                    self._simulate(item)
        for _ in range(MOST_POLISHES):
            if not self._polish():
                break
        self._correct()
        return Ranked(in_order(self.candidates, self.options), self.num_simulated, self.notes)

    @property
    def _best(self) -> float:
        return value_of(self.candidates[0], self.options) if self.candidates else inf

    def _simulate(self, item: _Waiting) -> None:
        """Puts a plan back with its simulated time, if it is legal."""
        problem = self.real[id(item.pooled.candidate.problem)].original
        timed = time_plan(item.plan, problem, item.pooled.estimate.time_s)
        self.num_simulated += 1
        if isinstance(timed, Timed):
            heappush(self._waiting, item.known(faster_form(item.plan, timed), self.options))
        else:
            self.notes.append(f"{item.plan.name}: {timed}")

    def _admit(self, item: _Waiting, timed: Timed) -> None:
        """Admits a plan that fits; otherwise its plainer form waits, and one that is cut for less memory."""
        admitted = admit(timed, self.options)
        if isinstance(admitted, RankedPlan):
            self.candidates.append(admitted)
            self._origins[id(admitted)] = item.pooled
            return
        self.notes.append(f"{item.plan.name}: {admitted}")
        if timed.plainer is not None:
            heappush(self._waiting, item.known(timed.plainer, self.options))
        elif item.repairs < MOST_REPAIRS and item.value < self._best:
            repair = repaired(self.pool, item.pooled.candidate, timed)
            if repair is not None:
                self.real[id(repair.candidate.problem)] = self.real[id(item.pooled.candidate.problem)]
                for plan in [*self._plans(repair)][:1]:
                    heappush(self._waiting, plan._replace(repairs=item.repairs + 1))

    def _polish(self) -> bool:
        """Simulates the neighbours of the fastest plan; returns whether one of them is faster."""
        fastest = min(self.candidates, key=lambda plan: value_of(plan, self.options), default=None)
        if fastest is None or self.pool.elapsed_s > self.options.time_budget_s or self.pool.max_score < inf:
            return False
        origin, estimates = self._origins[id(fastest)], list[PooledPlan]()
        for candidate in neighbours(origin.candidate):
            cost = self.pool.estimate(candidate)
            score = self.pool.score(candidate.problem, candidate.devices, cost.time_s)
            if cost.fits and score <= SLACK * origin.score and candidate.stages not in self._polished:
                estimates.append(PooledPlan(candidate, cost, score))
        for pooled in sorted(estimates, key=lambda pooled: pooled.score)[:MOST_NEIGHBOURS]:
            self._polished.append(pooled.candidate.stages)
            item = next(self._plans(pooled))
            if item.value < value_of(fastest, self.options):
                self._simulate_now(item.plan, pooled, value_of(fastest, self.options))
        return min(self.candidates, key=lambda plan: value_of(plan, self.options)) is not fastest

    def _correct(self) -> None:
        """Adds the corrected forms of the first stale plan of each kind; keeps only these if one was asked for."""
        asked = self.options.correction
        ordered = in_order(self.candidates, self.options) if self.options.staleness and asked != "none" else []
        firsts = {plan.plan.version.kind: plan for plan in reversed(ordered) if plan.plan.is_flush_free}
        for base in firsts.values():
            for plan in corrected(base.plan, base.profile, asked):
                self._simulate_now(plan, self._origins[id(base)])
        if firsts and asked != "auto":
            self.candidates = [
                plan for plan in self.candidates if not plan.plan.is_flush_free or is_corrected(plan.plan)
            ]

    def _simulate_now(self, plan: Plan, pooled: PooledPlan, most: float = inf) -> None:
        """Simulates a plan and admits it if it fits and takes less than `most`."""
        self._waiting = []
        self._number += 1
        self._simulate(_Waiting(0.0, False, self._number, plan, pooled))
        for simulated in self._waiting:
            if simulated.timed is not None and simulated.value < most:
                self._admit(simulated._replace(repairs=MOST_REPAIRS), simulated.timed)

    def _plans(self, pooled: PooledPlan) -> Iterator[_Waiting]:
        """Yields the plan of a candidate, and under other schedules if none of its order and feed had them before."""
        candidate, pool, options = pooled.candidate, self.pool, self.options
        costs = pool.costs(candidate.problem, candidate.samples)
        plan = write(candidate, options, costs)
        least = pool.score(candidate.problem, candidate.devices, lower_bound_s(candidate, costs))
        self._number += 1
        yield _Waiting(least / 3600 if options.objective == "price" else least, False, self._number, plan, pooled)
        key = f"{plan.order.kind} {plan.feed.kind}"
        others = [] if key in self._tried else other_orders(plan, candidate.problem.profile) + stashed(plan, options)
        for other in (p for p in others if not (options.is_runnable and why_not_run(p))):
            self._tried.add(key)
            self._number += 1
            yield _Waiting(0.0, False, self._number, other, pooled)


def in_order(candidates: list[RankedPlan], options: SearchOptions) -> list[RankedPlan]:
    """Returns the plans by time, but of plans within `NEAR` of the fastest the simplest first.

    Plans that divide state or operators count as `DIVIDED_NEAR` slower than they are. If the first is stale, its form
    that lost the least accuracy in the study comes before it.
    """

    def handicapped(ranked: RankedPlan) -> float:
        plan = ranked.plan
        is_divided = plan.keep.kind.startswith("zero") or plan.place.stage_shards is not None
        return value_of(ranked, options) * (DIVIDED_NEAR if is_divided else 1.0)

    left = sorted(candidates, key=lambda c: (handicapped(c), c.fullest_share))
    ordered = []
    while left:
        near = [n for n, c in enumerate(left) if handicapped(c) <= NEAR * handicapped(left[0])]
        ordered.append(left.pop(min(near, key=lambda n: (effort(left[n]), n))))
    if options.staleness and options.correction == "auto":
        return least_loss_first(ordered, lambda plan: value_of(plan, options))
    return ordered


def value_of(plan: Timed | RankedPlan, options: SearchOptions) -> float:
    """Returns the time or price to minimise, without the digits that depend on the order of sums."""
    value = plan.time_s
    if options.objective == "price":
        value = plan.price if isinstance(plan, RankedPlan) else price_of(plan, options)
    return float(f"{value:.9g}")


def effort(candidate: RankedPlan) -> tuple[bool, int]:
    """Returns a key by which simpler plans sort first."""
    plan = candidate.plan
    moves = (plan.keep.kind != "replicated") + (plan.keep.activations == "host") + bool(plan.place.stage_shards)
    moves += plan.order.head_chunks > 1
    return bool(candidate.only_costed), moves + plan.order.has_recompute + plan.is_flush_free + is_corrected(plan)
