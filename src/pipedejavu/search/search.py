"""`search`: the best plans for a model on a machine, found by one of the searchers and ranked by the simulator."""

from collections.abc import Callable, Iterator
from dataclasses import replace
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
"""Memory limits, as shares, to plan for if no plan for the whole memory passes the simulator."""
MOST_ROUNDS = 3
"""Rounds of simulations, each of as many plans as a search simulates otherwise, under an optimistic assumption."""
FEW = 500
"""Candidates up to which `auto` searches exhaustively."""

Run = Callable[[Pool, list[PlanningProblem], SearchOptions], bool]

SEARCHERS: dict[str, Run] = {
    "exhaustive": exhaustive.run,
    "dp": dp.run,
    "mcmc": mcmc.run,
    "gradient": gradient_descent.run,
}
"""Searchers by name; each fills a pool and returns whether it covered its whole space."""


def search(
    profile: Profile,
    machine: Machine,
    options: SearchOptions | None = None,
    progress: Progress | None = None,
    *,
    max_score: float = inf,
) -> SearchResult:
    """Returns the best plans that fit, each compiled, verified and simulated; none if nothing fits.

    When the time budget is over the result holds the best plans so far. With a `max_score` the search skips plans whose
    estimate (the time of an update, or its price times 3,600) is above it, which takes less time. Raises InputError if
    the profile has times for none of the machine's devices.
    """
    options = (options or SearchOptions()).agreed()
    check_units(profile)
    check_devices(len(usable(profile, machine, options)), machine.name)
    result = _search_form(profile.with_head_chunks(options.head_chunks or 1), machine, options, progress, max_score)
    for chunks in () if options.head_chunks else _other_forms(profile, machine, options):
        left_s = options.time_budget_s - result.time_s
        if left_s <= 0 or not _may_gain(profile, result, chunks):
            continue
        form, within = profile.with_head_chunks(chunks), options.replace(time_budget_s=left_s)
        result = _joined(result, _search_form(form, machine, within, progress, max_score), options)
    return result


TIGHT = 0.7
"""Share of a device's memory above which plans with the head in chunks are searched for too."""
FASTER = 0.99
"""The time of a head in chunks, as a share of that of the whole head, below which they are searched for anyway."""


def _other_forms(profile: Profile, machine: Machine, options: SearchOptions) -> list[int]:
    """Returns the numbers of chunks that the head of the model could run in, most chunks first.

    Only if all logits of a batch take a noticeable share of some device's memory.
    """
    forms = sorted((form for form in profile.head_forms if form.chunks > 1), key=lambda form: -form.chunks)
    whole = next((form for form in profile.head_forms if form.chunks == 1), None)
    least = min(machine.device(name).memory_bytes for name in usable(profile, machine, options))
    samples = options.samples or options.batch
    if whole is None or whole.boundary_bytes * samples < LEAST_LOGITS * least:
        return []
    return [form.chunks for form in forms]


LEAST_LOGITS = 1e-3
"""Share of the smallest device's memory that the logits of a batch take at least, if dividing them can matter."""


def _may_gain(profile: Profile, result: SearchResult, chunks: int) -> bool:
    """Whether plans with the head in chunks may be better: memory is tight, or chunks were measured to be faster."""
    best = result.best
    if best is None or best.fullest_share > TIGHT or _effort(best)[1]:
        return True
    form = next(form for form in profile.head_forms if form.chunks == chunks)
    last = profile.units[-1].times
    whole_s = {kind: (time.forward.at(1), time.backward.at(1)) for kind, time in last.items() if kind in form.forward}
    return any(
        form.forward[kind] * forward + form.backward[kind] * backward < FASTER * (forward + backward)
        for kind, (forward, backward) in whole_s.items()
    )


def _joined(one: SearchResult, other: SearchResult, options: SearchOptions) -> SearchResult:
    """Returns the best plans of two searches for the same question."""
    return one.replace(
        candidates=tuple(_in_order([*one.candidates, *other.candidates], options)[: options.candidates]),
        num_estimated=one.num_estimated + other.num_estimated,
        num_simulated=one.num_simulated + other.num_simulated,
        is_complete=one.is_complete and other.is_complete,
        time_s=one.time_s + other.time_s,
        notes=(*one.notes, *(note for note in other.notes if note not in one.notes)),
    )


def _search_form(
    profile: Profile, machine: Machine, options: SearchOptions, progress: Progress | None, max_score: float
) -> SearchResult:
    """Searches with the head of the model in the chunks that the profile is for."""
    pool = Pool(options, progress, max_score)
    attempt = _attempt(pool, profile, machine, options)
    for assumption in _ASSUMPTIONS if max_score == inf else ():
        if attempt.ranked.candidates or pool.is_over:
            break
        attempt = _attempt(pool.again(), profile, machine, options, assumption).beside(attempt)
    best = attempt.ranked.candidates[0] if attempt.ranked.candidates else None
    if best is not None and max_score == inf and any(_effort(best)) and not pool.is_over:
        leaner = pool.again(max_score=best.time_s if options.objective != "price" else 3600 * best.price)
        attempt = attempt.beside(_attempt(leaner, profile, machine, options, _OPTIMISTIC), options)
    pool.report(1.0, "done")
    return SearchResult(
        candidates=tuple(attempt.ranked.candidates),
        searcher=attempt.searcher,
        reason=attempt.reason,
        num_estimated=attempt.num_estimated,
        num_simulated=attempt.ranked.num_simulated,
        is_complete=attempt.is_complete,
        time_s=pool.elapsed_s,
        notes=tuple(attempt.ranked.notes),
    )


class _Assumption(NamedTuple):
    """What a search assumes about memory; the simulator then decides what fits."""

    share: float = 1.0
    """Memory limits as shares of the real ones."""
    is_optimistic: bool = False
    """Whether no stage holds inputs and outputs because its neighbours run ahead or wait."""


_OPTIMISTIC = _Assumption(is_optimistic=True)
_ASSUMPTIONS = (_Assumption(), _OPTIMISTIC, *(_Assumption(share) for share in SMALLER))
"""Tried in turn, with all devices, until a plan is found."""


class _Attempt(NamedTuple):
    """A search under one assumption."""

    ranked: "_Ranked"
    searcher: str
    reason: str
    is_complete: bool
    num_estimated: int

    def beside(self, other: "_Attempt", options: SearchOptions | None = None) -> "_Attempt":
        """Returns the attempt with the counts of another; with options also with its plans, in order."""
        ranked = self.ranked._replace(num_simulated=self.ranked.num_simulated + other.ranked.num_simulated)
        if options is not None:
            known = [candidate.plan for candidate in ranked.candidates]
            new = [candidate for candidate in other.ranked.candidates if candidate.plan not in known]
            both = _in_order([*ranked.candidates, *new], options)[: options.candidates]
            ranked = ranked._replace(candidates=both)
        return self._replace(ranked=ranked, num_estimated=self.num_estimated + other.num_estimated)


def _attempt(
    pool: Pool, profile: Profile, machine: Machine, options: SearchOptions, assumption: _Assumption | None = None
) -> _Attempt:
    """Fills a pool, with all devices if there is an assumption, and ranks its plans on the real machine."""
    real = [*problems_of(profile, machine, options, all_devices=assumption is not None)]
    assumed, rounds = real, None
    if assumption is not None and assumption != _Assumption():
        machine = with_memory(machine, times=assumption.share)
        assumed = [
            replace(problem, is_optimistic=assumption.is_optimistic)
            for problem in problems_of(profile, machine, options, all_devices=True)
        ]
        rounds = MOST_ROUNDS if assumption.is_optimistic else None
    name, reason = _choose(pool, assumed, options)
    is_complete = _fill(pool, assumed, options, name)
    with paused_collector():
        pairs = {id(a): problem for a, problem in zip(assumed, real, strict=True)}
        ranked = _rank(pool, options, pairs, rounds)
    return _Attempt(ranked, name, reason, is_complete, pool.num_estimated)


def _fill(pool: Pool, problems: list[PlanningProblem], options: SearchOptions, name: str) -> bool:
    """Fills a pool by a searcher; returns whether it covered its whole space."""
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
    is_exact = all(len(problem.profile.units) <= dp.MOST_CUTS for problem in problems)
    how = "exactly" if is_exact else f"among {dp.MOST_CUTS} places, then near it"
    return "dp", f"there are more than {FEW:,} drafts, and dynamic programming finds the best cut of a chain {how}"


class _Ranked(NamedTuple):
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

    def known(self, timed: Timed, options: SearchOptions) -> "_Waiting":
        """Returns the item with its simulated time."""
        return self._replace(value=_value(timed, options), is_timed=True, timed=timed)


def _rank(pool: Pool, options: SearchOptions, real: dict[int, PlanningProblem], rounds: int | None = None) -> _Ranked:
    """Simulates plans and admits the fastest, until there are enough and no other can be faster.

    The queue's first item is simulated, or admitted if it was simulated before. A plan whose lower bound is above all
    admitted ones is never simulated. If no plan is admitted the next candidates follow, at most for some `rounds`.
    `real` maps the problems of the pool to those to simulate on, which differ if another memory was planned for.
    """
    pooled_plans, tried, notes = pool.ranked(), set[str](), list[str]()
    candidates: list[RankedPlan] = []
    simulated = 0
    while pooled_plans and not candidates and (rounds is None or rounds > 0):
        rounds = None if rounds is None else rounds - 1
        waiting: list[_Waiting] = []
        while pooled_plans and len(waiting) < options.finalists:
            waiting += _plans(pool, pooled_plans.pop(0), options, tried, len(waiting))
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
                problem = real[id(item.pooled.candidate.problem)].original
                timed = time_plan(item.plan, problem, item.pooled.estimate.time_s)
                simulated += 1
                if isinstance(timed, Timed):
                    heappush(waiting, item.known(faster_form(item.plan, timed), options))
                else:
                    notes.append(f"{item.plan.name}: {timed}")
    return _Ranked(_in_order(candidates, options)[: options.candidates], simulated, notes)


def _in_order(candidates: list[RankedPlan], options: SearchOptions) -> list[RankedPlan]:
    """Returns the plans by time, but of plans within `NEAR` of the fastest the simplest first."""
    left = sorted(candidates, key=lambda c: (_value(c, options), c.fullest_share))
    ordered = []
    while left:
        near = [n for n, c in enumerate(left) if _value(c, options) <= NEAR * _value(left[0], options)]
        ordered.append(left.pop(min(near, key=lambda n: (_effort(left[n]), n))))
    return ordered


def _value(plan: Timed | RankedPlan, options: SearchOptions) -> float:
    """Returns the time or price to minimise, without the digits that depend on the order of sums."""
    value = plan.time_s
    if options.objective == "price":
        value = plan.price if isinstance(plan, RankedPlan) else price_of(plan, options)
    return float(f"{value:.9g}")


def _plans(pool: Pool, pooled: PooledPlan, options: SearchOptions, tried: set[str], number: int) -> Iterator[_Waiting]:
    """Yields the plan of a candidate, and under other schedules if no plan of its order and feed had them before."""
    candidate = pooled.candidate
    costs = pool.costs(candidate.problem, candidate.samples)
    plan = write(candidate, options, costs)
    least = pool.score(candidate.problem, candidate.devices, lower_bound_s(candidate, costs))
    yield _Waiting(least / 3600 if options.objective == "price" else least, False, number, plan, pooled)
    key = f"{plan.order.kind} {plan.feed.kind}"
    if key not in tried and (others := other_orders(plan, candidate.problem.profile) + stashed(plan, options)):
        tried.add(key)
        yield from (_Waiting(0.0, False, number + n, other, pooled) for n, other in enumerate(others, 1))


def _effort(candidate: RankedPlan) -> tuple[bool, int]:
    """Returns a key by which simpler plans sort first."""
    plan = candidate.plan
    moves = (plan.keep.kind != "replicated") + (plan.keep.activations == "host") + bool(plan.place.stage_shards)
    moves += plan.order.head_chunks > 1
    return bool(candidate.only_costed), moves + plan.order.has_recompute + plan.is_flush_free
