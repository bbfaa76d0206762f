"""`search`: the best plans for a model on a machine, by one of the searchers, ranked by the simulator."""

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from pipedejavu.facts import Machine, Profile, paused_collector
from pipedejavu.plan import Plan
from pipedejavu.program.limit import check_devices, check_units
from pipedejavu.search import dp, exhaustive, gradient, mcmc
from pipedejavu.search.draft import Scene
from pipedejavu.search.floor import floor_s
from pipedejavu.search.option import Options, Progress
from pipedejavu.search.pool import Found, Pool
from pipedejavu.search.rank import NEAR, Timed, admit, faster_form, price_of, time_plan
from pipedejavu.search.result import Candidate, SearchResult
from pipedejavu.search.room import with_memory
from pipedejavu.search.scene import scenes_of, usable
from pipedejavu.search.share import offer_beside, offer_shares
from pipedejavu.search.write import other_orders, stashed, write

SMALLER = (0.9, 0.75, 0.6)
"""Parts of the memory that are planned for where no plan for all of it fits in the end."""
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
    profile: Profile,
    machine: Machine,
    options: Options | None = None,
    progress: Progress | None = None,
    *,
    most: float = inf,
) -> SearchResult:
    """Returns the best plans that fit, each compiled, verified and simulated; none where nothing fits.

    When the time budget is over the best so far is the answer. It takes less time where only plans are of interest
    whose estimate (of an update's time, or of its price times 3,600) is below `most`. Raises InputError where the
    profile knows none of the machine's devices.
    """
    options = (options or Options()).agreed()
    check_units(profile)
    check_devices(len(usable(profile, machine, options)), machine.name)
    pool = Pool(options, progress, most)
    scenes = [*scenes_of(profile, machine, options)]
    name, reason = _choose(pool, scenes, options)
    is_complete = _fill(pool, scenes, options, name)
    with paused_collector():
        ranked = _rank(pool, options, {id(scene): scene for scene in scenes})
    for part in (1.0, *SMALLER):
        if ranked.candidates or pool.is_over or most < inf:
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
    offer_beside(pool, scenes, options, SEARCHERS[name])
    pool.polish()
    return is_complete


def _choose(pool: Pool, scenes: list[Scene], options: Options) -> tuple[str, str]:
    """Returns the searcher to use, and why."""
    if options.searcher != "auto":
        return options.searcher, "it was asked for"
    count = exhaustive.count(pool, scenes, options, most=FEW)
    if count <= FEW:
        return "exhaustive", f"there are {count:,} drafts in all, few enough to look at each"
    is_exact = all(len(scene.profile.units) <= dp.PLACES for scene in scenes)
    how = "exactly" if is_exact else f"among {dp.PLACES} places, then near it"
    return "dp", f"there are more than {FEW:,} drafts, and dynamic programming finds the best cut of a chain {how}"


class _Ranked(NamedTuple):
    candidates: list[Candidate]
    num_simulated: int
    notes: list[str]


class _Waiting(NamedTuple):
    """A plan that may be among the best, as far as it is known."""

    value: float
    """To be least: what the simulator says, and before that what it cannot be below."""
    is_timed: bool
    number: int
    plan: Plan
    found: Found
    timed: Timed | None = None

    def known(self, timed: Timed, options: Options) -> "_Waiting":
        """Returns it with its time."""
        return self._replace(value=_value(timed, options), is_timed=True, timed=timed)


def _rank(pool: Pool, options: Options, real: dict[int, Scene]) -> _Ranked:
    """Simulates plans on real scenes and admits the fastest, until there are enough and no other can be faster.

    The first of those that wait is simulated, or admitted if it was: one whose floor is above all that are admitted
    needs no simulation. While none is fit to be admitted the next drafts come.
    """
    drafts, tried, notes = pool.ranked(), set[str](), list[str]()
    candidates: list[Candidate] = []
    simulated = 0
    while drafts and not candidates:
        waiting: list[_Waiting] = []
        while drafts and len(waiting) < options.finalists:
            waiting += _plans(pool, drafts.pop(0), options, tried, len(waiting))
        number, before = len(waiting), simulated
        heapify(waiting)
        while waiting:
            item = heappop(waiting)
            if len(candidates) >= options.candidates and item.value > NEAR * _value(candidates[0], options):
                break
            if item.timed is not None:
                admitted = admit(item.timed, options)
                if isinstance(admitted, Candidate):
                    candidates.append(admitted)
                else:
                    notes.append(f"{item.plan.name}: {admitted}")
                    if item.timed.plainer is not None:
                        heappush(waiting, item.known(item.timed.plainer, options))
            elif simulated == before or pool.elapsed_s < options.time_budget_s:
                pool.report(0.75 + 0.25 * (simulated - before) / number, f"simulating {item.plan.name}")
                scene = real[id(item.found.draft.scene)].asked
                timed = time_plan(item.plan, scene, item.found.estimate.time_s)
                simulated += 1
                if isinstance(timed, Timed):
                    heappush(waiting, item.known(faster_form(item.plan, timed), options))
                else:
                    notes.append(f"{item.plan.name}: {timed}")
    return _Ranked(_in_order(candidates, options)[: options.candidates], simulated, notes)


def _in_order(candidates: list[Candidate], options: Options) -> list[Candidate]:
    """Returns the fastest first, and before it a simpler one that is as fast; of the others again."""
    left = sorted(candidates, key=lambda c: (_value(c, options), c.fullest_share))
    found = []
    while left:
        near = [n for n, c in enumerate(left) if _value(c, options) <= NEAR * _value(left[0], options)]
        found.append(left.pop(min(near, key=lambda n: (_effort(left[n]), n))))
    return found


def _value(found: Timed | Candidate, options: Options) -> float:
    """Returns what is to be least of a plan, without the digits that depend on the order of sums."""
    value = found.time_s
    if options.objective == "price":
        value = found.price if isinstance(found, Candidate) else price_of(found, options)
    return float(f"{value:.9g}")


def _plans(pool: Pool, found: Found, options: Options, tried: set[str], number: int) -> Iterator[_Waiting]:
    """Yields the plan of a draft, and in other forms where none of its own order and feed has been."""
    draft = found.draft
    costs = pool.costs(draft.scene, draft.samples)
    plan = write(draft, options, costs)
    least = pool.score(draft.scene, draft.devices, floor_s(draft, costs))
    yield _Waiting(least / 3600 if options.objective == "price" else least, False, number, plan, found)
    sort = f"{plan.order.kind} {plan.feed.kind}"
    if sort not in tried and (others := other_orders(plan, draft.scene.profile) + stashed(plan, options)):
        tried.add(sort)
        yield from (_Waiting(0.0, False, number + n, other, found) for n, other in enumerate(others, 1))


def _effort(candidate: Candidate) -> tuple[bool, int]:
    """Returns what makes a plan less simple than another that is about as fast."""
    plan = candidate.plan
    moves = (plan.keep.kind != "replicated") + (plan.keep.activations == "host") + bool(plan.place.stage_shards)
    return bool(candidate.only_costed), moves + plan.order.has_recompute + plan.is_flush_free
