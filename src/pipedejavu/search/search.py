"""`search`: the best plans for a model on a machine, by one of the searchers, ranked by the simulator."""

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from pipedejavu.facts import Machine, Profile, paused_collector
from pipedejavu.plan import Plan
from pipedejavu.program.limit import check_devices, check_units
from pipedejavu.search import dp, exhaustive, gradient_descent, mcmc
from pipedejavu.search.candidate_plan import PlanningProblem
from pipedejavu.search.lower_bound import lower_bound_s
from pipedejavu.search.memory_limit import with_memory
from pipedejavu.search.plan_pool import Pool, PooledPlan
from pipedejavu.search.plan_writer import other_orders, stashed, write
from pipedejavu.search.planning_problem import problems_of, usable
from pipedejavu.search.ranking import NEAR, Timed, admit, faster_form, price_of, time_plan
from pipedejavu.search.search_options import Progress, SearchOptions
from pipedejavu.search.search_result import RankedPlan, SearchResult
from pipedejavu.search.share_offer import offer_beside, offer_shares

SMALLER = (0.9, 0.75, 0.6)
"""Parts of the memory that are planned for where no plan for all of it fits in the end."""
FEW = 500
"""Drafts that `auto` looks at one by one."""

Run = Callable[[Pool, list[PlanningProblem], SearchOptions], bool]

SEARCHERS: dict[str, Run] = {
    "exhaustive": exhaustive.run,
    "dp": dp.run,
    "mcmc": mcmc.run,
    "gradient": gradient_descent.run,
}
"""By name: each fills a pool and returns whether it looked at all there is."""


def search(
    profile: Profile,
    machine: Machine,
    options: SearchOptions | None = None,
    progress: Progress | None = None,
    *,
    most: float = inf,
) -> SearchResult:
    """Returns the best plans that fit, each compiled, verified and simulated; none where nothing fits.

    When the time budget is over the best so far is the answer. It takes less time where only plans are of interest
    whose estimate (of an update's time, or of its price times 3,600) is below `most`. Raises InputError where the
    profile knows none of the machine's devices.
    """
    options = (options or SearchOptions()).agreed()
    check_units(profile)
    check_devices(len(usable(profile, machine, options)), machine.name)
    pool = Pool(options, progress, most)
    problems = [*problems_of(profile, machine, options)]
    name, reason = _choose(pool, problems, options)
    is_complete = _fill(pool, problems, options, name)
    with paused_collector():
        ranked = _rank(pool, options, {id(problem): problem for problem in problems})
    for part in (1.0, *SMALLER):
        if ranked.candidates or pool.is_over or most < inf:
            break
        # Every device may help now; and where memory was estimated too low, plans that would need less may fit.
        real = [*problems_of(profile, machine, options, everyone=True)]
        assumed = [*problems_of(profile, with_memory(machine, times=part), options, everyone=True)]
        again = Pool(options, progress)
        name, reason = _choose(again, assumed, options)
        is_complete = _fill(again, assumed, options, name)
        if not again.found:
            break
        ranked = _rank(again, options, {id(a): problem for a, problem in zip(assumed, real, strict=True)})
    pool.report(1.0, "done")
    return SearchResult(
        candidates=tuple(ranked.candidates),
        searcher=name,
        reason=reason,
        num_estimated=pool.num_estimated,
        num_simulated=ranked.num_simulated,
        is_complete=is_complete,
        time_s=pool.elapsed_s,
        notes=tuple(ranked.notes),
    )


def _fill(pool: Pool, problems: list[PlanningProblem], options: SearchOptions, name: str) -> bool:
    """Fills a pool by a searcher; returns whether it looked at all there is."""
    offer_shares(pool, problems, options)
    is_complete = SEARCHERS[name](pool, problems, options)
    offer_beside(pool, problems, options, SEARCHERS[name])
    pool.polish()
    return is_complete


def _choose(pool: Pool, problems: list[PlanningProblem], options: SearchOptions) -> tuple[str, str]:
    """Returns the searcher to use, and why."""
    if options.searcher != "auto":
        return options.searcher, "it was asked for"
    count = exhaustive.count(pool, problems, options, most=FEW)
    if count <= FEW:
        return "exhaustive", f"there are {count:,} drafts in all, few enough to look at each"
    is_exact = all(len(problem.profile.units) <= dp.PLACES for problem in problems)
    how = "exactly" if is_exact else f"among {dp.PLACES} places, then near it"
    return "dp", f"there are more than {FEW:,} drafts, and dynamic programming finds the best cut of a chain {how}"


class _Ranked(NamedTuple):
    candidates: list[RankedPlan]
    num_simulated: int
    notes: list[str]


class _Waiting(NamedTuple):
    """A plan that may be among the best, as far as it is known."""

    value: float
    """To be least: what the simulator says, and before that what it cannot be below."""
    is_timed: bool
    number: int
    plan: Plan
    found: PooledPlan
    timed: Timed | None = None

    def known(self, timed: Timed, options: SearchOptions) -> "_Waiting":
        """Returns it with its time."""
        return self._replace(value=_value(timed, options), is_timed=True, timed=timed)


def _rank(pool: Pool, options: SearchOptions, real: dict[int, PlanningProblem]) -> _Ranked:
    """Simulates plans on real scenes and admits the fastest, until there are enough and no other can be faster.

    The first of those that wait is simulated, or admitted if it was: one whose floor is above all that are admitted
    needs no simulation. While none is fit to be admitted the next drafts come.
    """
    candidate_plans, tried, notes = pool.ranked(), set[str](), list[str]()
    candidates: list[RankedPlan] = []
    simulated = 0
    while candidate_plans and not candidates:
        waiting: list[_Waiting] = []
        while candidate_plans and len(waiting) < options.finalists:
            waiting += _plans(pool, candidate_plans.pop(0), options, tried, len(waiting))
        number, before = len(waiting), simulated
        heapify(waiting)
        while waiting:
            item = heappop(waiting)
            if len(candidates) >= options.candidates and item.value > NEAR * _value(candidates[0], options):
                break
            if item.timed is not None:
                admitted = admit(item.timed, options)
                if isinstance(admitted, RankedPlan):
                    candidates.append(admitted)
                else:
                    notes.append(f"{item.plan.name}: {admitted}")
                    if item.timed.plainer is not None:
                        heappush(waiting, item.known(item.timed.plainer, options))
            elif simulated == before or pool.elapsed_s < options.time_budget_s:
                pool.report(0.75 + 0.25 * (simulated - before) / number, f"simulating {item.plan.name}")
                problem = real[id(item.found.candidate.problem)].asked
                timed = time_plan(item.plan, problem, item.found.estimate.time_s)
                simulated += 1
                if isinstance(timed, Timed):
                    heappush(waiting, item.known(faster_form(item.plan, timed), options))
                else:
                    notes.append(f"{item.plan.name}: {timed}")
    return _Ranked(_in_order(candidates, options)[: options.candidates], simulated, notes)


def _in_order(candidates: list[RankedPlan], options: SearchOptions) -> list[RankedPlan]:
    """Returns the fastest first, and before it a simpler one that is as fast; of the others again."""
    left = sorted(candidates, key=lambda c: (_value(c, options), c.fullest_share))
    found = []
    while left:
        near = [n for n, c in enumerate(left) if _value(c, options) <= NEAR * _value(left[0], options)]
        found.append(left.pop(min(near, key=lambda n: (_effort(left[n]), n))))
    return found


def _value(found: Timed | RankedPlan, options: SearchOptions) -> float:
    """Returns what is to be least of a plan, without the digits that depend on the order of sums."""
    value = found.time_s
    if options.objective == "price":
        value = found.price if isinstance(found, RankedPlan) else price_of(found, options)
    return float(f"{value:.9g}")


def _plans(pool: Pool, found: PooledPlan, options: SearchOptions, tried: set[str], number: int) -> Iterator[_Waiting]:
    """Yields the plan of a draft, and in other forms where none of its own order and feed has been."""
    candidate = found.candidate
    costs = pool.costs(candidate.problem, candidate.samples)
    plan = write(candidate, options, costs)
    least = pool.score(candidate.problem, candidate.devices, lower_bound_s(candidate, costs))
    yield _Waiting(least / 3600 if options.objective == "price" else least, False, number, plan, found)
    sort = f"{plan.order.kind} {plan.feed.kind}"
    if sort not in tried and (others := other_orders(plan, candidate.problem.profile) + stashed(plan, options)):
        tried.add(sort)
        yield from (_Waiting(0.0, False, number + n, other, found) for n, other in enumerate(others, 1))


def _effort(candidate: RankedPlan) -> tuple[bool, int]:
    """Returns what makes a plan less simple than another that is about as fast."""
    plan = candidate.plan
    moves = (plan.keep.kind != "replicated") + (plan.keep.activations == "host") + bool(plan.place.stage_shards)
    return bool(candidate.only_costed), moves + plan.order.has_recompute + plan.is_flush_free
