"""`search`: the best plans for a model on a machine, by one of the searchers, ranked by the simulator."""

from collections.abc import Callable
from typing import NamedTuple

from pipedejavu.facts import Machine, Profile
from pipedejavu.search import dp, exhaustive, gradient, mcmc
from pipedejavu.search.draft import Scene
from pipedejavu.search.option import Options, Progress
from pipedejavu.search.pool import Pool
from pipedejavu.search.rank import simulate_plan
from pipedejavu.search.result import Candidate, SearchResult
from pipedejavu.search.room import with_memory
from pipedejavu.search.scene import scenes_of
from pipedejavu.search.share import offer_shares
from pipedejavu.search.write import other_orders, write

SMALLER = (0.9, 0.75, 0.6)
"""Parts of the memory that are planned for where no plan for all of it fits in the end."""
NEAR = 1.01
"""Plans that take so many times the least are as fast, and the simplest of them comes first."""
FEW = 2000
"""Drafts that `auto` looks at one by one."""

Run = Callable[[Pool, list[Scene], Options], bool]

SEARCHERS: dict[str, Run] = {
    "exhaustive": exhaustive.run,
    "dp": dp.run,
    "mcmc": mcmc.run,
    "gradient": gradient.run,
}
"""By name: each fills a pool and returns whether it looked at all there is."""


def search(
    profile: Profile, machine: Machine, options: Options | None = None, progress: Progress | None = None
) -> SearchResult:
    """Returns the best plans that fit, each compiled, verified and simulated; none where nothing fits.

    When the time budget is over the best so far is the answer. Raises InputError where the profile knows none of the
    machine's devices.
    """
    options = (options or Options()).agreed()
    pool = Pool(options, progress)
    scenes = [*scenes_of(profile, machine, options)]
    name, reason = _choose(pool, scenes, options)
    is_complete = _fill(pool, scenes, options, name)
    ranked = _rank(pool, options, {id(scene): scene for scene in scenes})
    for part in (1.0, *SMALLER):
        if ranked.candidates or pool.is_over:
            break
        # Every device may help now; and where memory was estimated too low, plans that would need less may fit.
        real = [*scenes_of(profile, machine, options, everyone=True)]
        assumed = [*scenes_of(profile, with_memory(machine, times=part), options, everyone=True)]
        again = Pool(options, progress)
        is_complete = _fill(again, assumed, options, name)
        ranked = _rank(again, options, {id(a): scene for a, scene in zip(assumed, real, strict=True)})
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


def _fill(pool: Pool, scenes: list[Scene], options: Options, name: str) -> bool:
    """Fills a pool by a searcher; returns whether it looked at all there is."""
    offer_shares(pool, scenes, options)
    is_complete = SEARCHERS[name](pool, scenes, options)
    pool.polish()
    return is_complete


def _choose(pool: Pool, scenes: list[Scene], options: Options) -> tuple[str, str]:
    """Returns the searcher to use, and why."""
    if options.searcher != "auto":
        return options.searcher, "it was asked for"
    count = exhaustive.count(pool, scenes, options, most=FEW)
    if count <= FEW:
        return "exhaustive", f"there are {count:,} drafts in all, few enough to look at each"
    return "dp", f"there are more than {FEW:,} drafts, and dynamic programming finds the best cut of a chain exactly"


class _Ranked(NamedTuple):
    candidates: list[Candidate]
    num_simulated: int
    notes: list[str]


def _rank(pool: Pool, options: Options, real: dict[int, Scene]) -> _Ranked:
    """Simulates drafts on real scenes, best first, until there are enough or the time is over; one at least."""
    candidates: list[Candidate] = []
    notes: list[str] = []
    tried: set[str] = set()
    """Orders of which the best draft has been simulated under other orders too."""
    simulated = 0
    for found in pool.ranked():
        if candidates and (len(candidates) >= options.candidates or pool.elapsed_s > options.time_budget_s):
            break
        draft = found.draft
        plan = write(draft, options, pool.costs(draft.scene, draft.samples))
        pool.report(0.75 + 0.25 * len(candidates) / options.candidates, f"simulating {plan.name}")
        others = other_orders(plan, len(draft.scene.profile.units)) if plan.order.kind not in tried else []
        tried.add(plan.order.kind)
        for each in (plan, *others):
            result = simulate_plan(each, real[id(draft.scene)], options, found.estimate.time_s)
            simulated += 1
            if isinstance(result, Candidate):
                candidates.append(result)
            else:
                notes.append(f"{each.name}: {result}")
    by_price = options.objective == "price"
    candidates.sort(key=lambda c: c.price if by_price else c.time_s)
    candidates = candidates[: options.candidates]
    near = [c for c in candidates if c.time_s <= NEAR * candidates[0].time_s and not by_price]
    return _Ranked(sorted(near, key=_effort) + candidates[len(near) :], simulated, notes)


def _effort(candidate: Candidate) -> tuple[bool, int, float]:
    """Returns what makes a plan less simple than another that is about as fast."""
    plan = candidate.plan
    moves = (plan.keep.kind != "replicated") + (plan.keep.activations == "host")
    return bool(candidate.only_costed), moves + plan.order.has_recompute + plan.is_flush_free, candidate.time_s
