"""`search`: the best plans for a model on a machine, found by one of the searchers and ranked by the simulator."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import NamedTuple

from pipedejavu.facts import Machine, Profile, paused_collector
from pipedejavu.program.limit import check_devices, check_units
from pipedejavu.search import dp, exhaustive, gradient_descent, mcmc
from pipedejavu.search.candidate_plan import PlanningProblem
from pipedejavu.search.correction_choice import GivenUp, shown, what_is_given_up
from pipedejavu.search.memory_limit import with_memory
from pipedejavu.search.plan_pool import Pool
from pipedejavu.search.planning_problem import problems_of, usable
from pipedejavu.search.search_options import Progress, SearchOptions
from pipedejavu.search.search_result import RankedPlan, SearchResult
from pipedejavu.search.share_offer import offer_beside, offer_shares
from pipedejavu.search.simulation_queue import Ranked, SimulationQueue, effort, in_order

LARGER = (0.95, 1.1, 1.25)
"""Memory limits, as shares, to plan for optimistically after that; the simulator may need less than the estimate."""
SMALLER = (0.9, 0.75, 0.6)
"""Memory limits, as shares, to plan for if no plan for the whole memory passes the simulator."""
SECOND_SHARE = 0.4
"""Share of the time budget after which a search that found a plan does not begin again with optimistic estimates."""
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


def price_of_staleness(
    profile: Profile, machine: Machine, options: SearchOptions, best: RankedPlan, progress: Progress | None = None
) -> GivenUp | None:
    """Returns what a stale plan gives up against the fastest exact one, which it searches for; None for exact plans."""
    if not best.plan.is_flush_free:
        return None
    synchronous = options.replace(staleness=0, correction="auto", candidates=1)
    exact = search(profile, machine, synchronous, progress).best
    return what_is_given_up(best, exact) if exact else None


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
    if best is None or best.fullest_share > TIGHT or effort(best)[1]:
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
        candidates=tuple(shown(in_order([*one.candidates, *other.candidates], options), options.candidates)),
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
    has_time = pool.elapsed_s < SECOND_SHARE * options.time_budget_s
    if best is not None and max_score == inf and any(effort(best)) and has_time:
        leaner = pool.again(max_score=best.time_s if options.objective != "price" else 3600 * best.price)
        attempt = attempt.beside(_attempt(leaner, profile, machine, options, _OPTIMISTIC), options)
    pool.report(1.0, "done")
    return SearchResult(
        candidates=tuple(shown(attempt.ranked.candidates, options.candidates)),
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
_ASSUMPTIONS = (
    _Assumption(),
    _OPTIMISTIC,
    *(_Assumption(share, is_optimistic=True) for share in LARGER),
    *(_Assumption(share) for share in SMALLER),
)
"""Tried in turn, with all devices, until a plan is found."""


class _Attempt(NamedTuple):
    """A search under one assumption."""

    ranked: Ranked
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
            ranked = ranked._replace(candidates=in_order([*ranked.candidates, *new], options))
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
        ranked = SimulationQueue(pool, options, pairs).rank(rounds)
    return _Attempt(ranked, name, reason, is_complete, pool.num_estimated)


def _fill(pool: Pool, problems: list[PlanningProblem], options: SearchOptions, name: str) -> bool:
    """Fills a pool by a searcher; returns whether it covered its whole space."""
    offer_shares(pool, problems, options)
    if name == "exhaustive" and exhaustive.count(pool, problems, options, most=FEW) > FEW:
        dp.run(pool, problems, options)  # if the time is over before all candidates are estimated, the best are known
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
