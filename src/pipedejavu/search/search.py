"""`search`: the best plans for a model on a machine, by one of the searchers, ranked by the simulator."""

from collections.abc import Callable
from typing import NamedTuple

from pipedejavu.facts import Machine, Profile
from pipedejavu.search import dp, exhaustive
from pipedejavu.search.draft import Scene
from pipedejavu.search.option import Options, Progress
from pipedejavu.search.pool import Pool
from pipedejavu.search.rank import simulate_plan
from pipedejavu.search.result import Candidate, SearchResult
from pipedejavu.search.scene import scenes_of
from pipedejavu.search.share import offer_shares
from pipedejavu.search.write import write

FEW = 2000
"""Drafts that `auto` looks at one by one."""

Run = Callable[[Pool, list[Scene], Options], bool]

SEARCHERS: dict[str, Run] = {"exhaustive": exhaustive.run, "dp": dp.run}
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
    offer_shares(pool, scenes, options)
    is_complete = SEARCHERS[name](pool, scenes, options)
    pool.polish()
    ranked = _rank(pool, options)
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


def _rank(pool: Pool, options: Options) -> _Ranked:
    """Simulates drafts, best first, until there are enough or the time is over; one at least."""
    candidates: list[Candidate] = []
    notes: list[str] = []
    simulated = 0
    for found in pool.ranked():
        if candidates and (len(candidates) >= options.candidates or pool.elapsed_s > options.time_budget_s):
            break
        draft = found.draft
        plan = write(draft, options, pool.costs(draft.scene, draft.samples))
        pool.report(0.75 + 0.25 * len(candidates) / options.candidates, f"simulating {plan.name}")
        result = simulate_plan(plan, found.draft.scene, options, found.estimate.time_s)
        simulated += 1
        if isinstance(result, Candidate):
            candidates.append(result)
        else:
            notes.append(f"{plan.name}: {result}")
    by_price = options.objective == "price"
    candidates.sort(key=lambda c: (c.price if by_price else c.time_s, c.plan.num_workers))
    return _Ranked(candidates, simulated, notes)
