"""`search`: the best plans for a model on a machine, by one of the searchers, ranked by the simulator."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from pipedejavu.facts import Machine, Profile
from pipedejavu.plan import Plan
from pipedejavu.program.limit import check_units
from pipedejavu.search import dp, exhaustive, gradient, mcmc
from pipedejavu.search.draft import Scene
from pipedejavu.search.option import Options, Progress
from pipedejavu.search.pool import Found, Pool
from pipedejavu.search.rank import Timed, admit, price_of, time_plan
from pipedejavu.search.result import Candidate, SearchResult
from pipedejavu.search.room import with_memory
from pipedejavu.search.scene import scenes_of
from pipedejavu.search.share import offer_shares
from pipedejavu.search.write import other_orders, write

SMALLER = (0.9, 0.75, 0.6)
"""Parts of the memory that are planned for where no plan for all of it fits in the end."""
NEAR = 1.01
"""Plans that take so many times the least are as fast, and the simplest of them comes first."""
FEW = 500
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
    check_units(profile)
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
        name, reason = _choose(again, assumed, options)
        is_complete = _fill(again, assumed, options, name)
        if not again.found:
            break
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
    """Simulates drafts on real scenes, best first, and admits the fastest; goes on while none is fit to be admitted."""
    waiting, tried, notes = pool.ranked(), set[str](), list[str]()
    timed: list[Timed] = []
    candidates: list[Candidate] = []
    simulated, by_price = 0, options.objective == "price"

    def key(found: Timed | Candidate) -> float:
        value = found.time_s
        if by_price:
            value = found.price if isinstance(found, Candidate) else price_of(found, options)
        return float(f"{value:.9g}")  # the last digits depend on the order of sums

    while waiting and not candidates:
        last = simulated + options.finalists
        timed.clear()
        while waiting and simulated < last and (not timed or pool.elapsed_s < options.time_budget_s):
            for plan, found in _plans(pool, waiting.pop(0), options, tried):
                pool.report(1 - 0.25 * (last - simulated) / options.finalists, f"simulating {plan.name}")
                result = time_plan(plan, real[id(found.draft.scene)].asked, found.estimate.time_s)
                simulated += 1
                if isinstance(result, Timed):
                    timed.append(result)
                else:
                    notes.append(f"{plan.name}: {result}")
        for each in sorted(timed, key=key):
            is_enough = len(candidates) >= options.candidates
            if is_enough and key(each) > NEAR * key(candidates[0]):
                break
            admitted = admit(each, options)
            if isinstance(admitted, Candidate):
                candidates.append(admitted)
            else:
                notes.append(f"{each.plan.name}: {admitted}")
    candidates.sort(key=lambda c: (key(c), c.fullest_share))
    near = [c for c in candidates if key(c) <= NEAR * key(candidates[0])]
    near.sort(key=lambda c: (_effort(c), key(c), c.fullest_share))
    return _Ranked((near + candidates[len(near) :])[: options.candidates], simulated, notes)


def _plans(pool: Pool, found: Found, options: Options, tried: set[str]) -> Iterator[tuple[Plan, Found]]:
    """Yields the plan of a draft, and under other orders where none of its own order has been tried under them."""
    draft = found.draft
    plan = write(draft, options, pool.costs(draft.scene, draft.samples))
    yield plan, found
    if plan.order.kind not in tried:
        tried.add(plan.order.kind)
        yield from ((other, found) for other in other_orders(plan, len(draft.scene.profile.units)))


def _effort(candidate: Candidate) -> tuple[bool, int]:
    """Returns what makes a plan less simple than another that is about as fast."""
    plan = candidate.plan
    moves = (plan.keep.kind != "replicated") + (plan.keep.activations == "host") + bool(plan.place.stage_shards)
    return bool(candidate.only_costed), moves + plan.order.has_recompute + plan.is_flush_free
