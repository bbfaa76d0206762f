"""The pool that all searchers fill: drafts that fit with their estimates, the clock, and what is worth looking at."""

import time
from dataclasses import dataclass, replace
from functools import cache
from math import inf

from pipedejavu.program.crew import assign_devices, crews_of
from pipedejavu.program.share import Split
from pipedejavu.search.cost import Costs, Estimate, estimate, recomputed_units
from pipedejavu.search.draft import Draft, Mode, Scene, note_of
from pipedejavu.search.option import Options, Progress
from pipedejavu.search.space import Frame
from pipedejavu.search.write import write

SLACK = 1.2
"""The simulator may rank a draft first whose estimate is so many times the least: estimates err, most of all where
transfers and reductions meet on a network interface."""

TIED = 1 + 1e-6
"""Of a score, what others may have of which the one that needs less memory is kept."""

MOST_SPLITS = 32
"""Divisions of a stage's optimizer state between a device and its host that are tried."""


@dataclass(frozen=True)
class Found:
    """A draft and its estimate."""

    draft: Draft
    estimate: Estimate
    score: float

    @property
    def merit(self) -> tuple[float, float]:
        """What is least of the best: the score, without the digits that depend on the order of sums, then memory."""
        return float(f"{self.score:.9g}"), self.estimate.shortage


class Pool:
    """Drafts that fit, the best of each sort."""

    def __init__(self, options: Options, progress: Progress | None = None, most: float = inf):
        self.options, self.progress, self.most = options, progress, most
        self.started_s = time.monotonic()
        self.found: dict[tuple[object, ...], Found] = {}
        self.num_estimated = 0
        self.shortage = inf
        """The least shortage of memory of all drafts that were looked at."""
        self.tightest: Draft | None = None
        """The draft that has it."""
        self._costs: dict[tuple[int, int], Costs] = {}

    def costs(self, scene: Scene, samples: int) -> Costs:
        """Returns the costs of a scene for microbatches of one size."""
        key = (id(scene), samples)
        if key not in self._costs:
            self._costs[key] = Costs(scene, samples)
        return self._costs[key]

    def estimate(self, draft: Draft) -> Estimate:
        """Returns what a draft costs."""
        self.num_estimated += 1
        if draft.is_shared:
            return _estimate_shares(draft, self.costs(draft.scene, draft.samples), self.options)
        return estimate(draft, self.costs(draft.scene, draft.samples))

    def offer(self, draft: Draft, cost: Estimate | None = None) -> float:
        """Keeps a draft that fits and is the best of its sort; returns its score, infinite where it does not fit."""
        cost = cost or self.estimate(draft)
        if cost.shortage < self.shortage:
            self.shortage, self.tightest = cost.shortage, draft
        if not cost.fits:
            return inf
        score = self.score(draft.scene, draft.devices, cost.time_s)
        if score > self.most:
            return score
        if draft.mode.recomputes and not recomputed_units(draft, self.costs(draft.scene, draft.samples)):
            draft = replace(draft, mode=replace(draft.mode, recomputes=False))
        zero = max(stage.zero for stage in draft.stages)
        if draft.mode.zero != zero:
            draft = replace(draft, mode=replace(draft.mode, zero=zero))
        key, found = _sort_of(draft), Found(draft, cost, score)
        if key not in self.found or found.merit < self.found[key].merit:
            self.found[key] = found
        return score

    def polish(self) -> None:
        """Tries more of the best drafts: some optimizer state on the device where it is kept on the host.

        And ZeRO-3 where a pipeline has ZeRO-1: only by the estimate it takes as long.
        """
        divided = [found.draft for found in self.ranked() if found.draft.mode.zero == 1]
        for draft in (d for d in divided[: self.options.candidates] if len(d.stages) > 1):
            stages = tuple(replace(stage, zero=3 * stage.zero) for stage in draft.stages)
            self.offer(replace(draft, stages=stages, mode=replace(draft.mode, zero=3)))
        on_host = [found.draft for found in self.ranked() if found.draft.mode.state == "host"]
        for draft in on_host[: self.options.candidates]:
            most = min(stage.end - stage.start for stage in draft.stages)
            counts = sorted({most * n // MOST_SPLITS for n in range(1, MOST_SPLITS)} - {0})
            for count in counts:
                self.offer(replace(draft, mode=replace(draft.mode, device_pieces=count)))

    def score(self, scene: Scene, devices: tuple[str, ...], time_s: float) -> float:
        """Returns what is to be least: the time of an update, or its price."""
        return time_s * self._rate(scene, devices)

    def limit(self, frame: Frame) -> float:
        """Returns the score from which on a frame's best draft would neither be kept nor simulated."""
        sorts = _sorts_of(frame)
        kept = [self.found[sort].score for sort in sorts if sort in self.found]
        limit = max(kept) * TIED if len(kept) == len(sorts) else inf
        if kept and len(sorts) > 1:  # sorts that are worse, or were not found, are of use where they are about as good
            limit = min(limit, SLACK * min(kept) * TIED)
        return min(self.cutoff, limit)

    def limit_s(self, frame: Frame) -> float:
        """Returns that limit as a time."""
        rate = self._rate(frame.scene, frame.order)
        return self.limit(frame) / rate if rate else inf

    def _rate(self, scene: Scene, devices: tuple[str, ...]) -> float:
        if self.options.objective != "price":
            return 1.0
        kinds = (scene.asked.machine.device(name).kind for name in devices)
        return scene.team_size * sum(self.options.prices.get(kind, 0.0) for kind in kinds)

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

    def ranked(self) -> list[Found]:
        """Returns what was found, best first."""
        return sorted(self.found.values(), key=lambda found: (found.score, len(found.draft.devices)))

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


def _sort_of(draft: Draft) -> _Sort:
    devices = len(draft.devices) * draft.scene.team_size
    if len({*draft.degrees}) > 1:
        return draft.mode.recomputes, devices
    return _sort(draft.note, draft.mode, len(draft.stages), devices, draft.is_stale, draft.is_shared)


def _sorts_of(frame: Frame) -> set[_Sort]:
    """Returns the sorts of which a frame's best draft may be: it may have nothing to compute again, or to divide."""
    count, scene, again = len(frame.order), frame.scene, {False, frame.mode.recomputes}
    devices = count * scene.team_size
    modes = [replace(frame.mode, recomputes=r, zero=zero) for r in again for zero in frame.zeros]
    found: set[_Sort] = {(r, devices) for r in again} if len(frame.degrees) > 1 else set()
    for degree in frame.degrees:
        note = note_of((degree * scene.team_size,), scene)
        counts = _counts(count, tuple(size * degree for size in frame.sizes))
        found |= {_sort(note, mode, stages, devices, frame.is_stale) for mode in modes for stages in counts}
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


def _estimate_shares(draft: Draft, costs: Costs, options: Options) -> Estimate:
    """Returns what unequal shares of a batch cost, by the shares that `compile` will give."""
    plan, machine = write(draft, options, costs), draft.scene.machine
    devices = draft.devices if draft.scene.teams else assign_devices(plan, machine)
    split = Split(plan, draft.scene.profile, machine, crews_of(plan), devices)
    shares, _ = split.choose()
    if not all(shares):
        return Estimate(inf, {}, inf)  # a plan for fewer devices says the same
    time_s, memory = split.estimate(shares).total_s, dict[str, float]()
    if draft.cpus:
        alone, size = estimate(draft, costs), draft.sizes[0]
        equal = (split.total // size,) * size + (0,) * len(draft.cpus)
        time_s, memory = alone.time_s * time_s / split.estimate(equal).total_s, alone.memory
    state = float(costs.weights[-1] + costs.gradients[-1] + costs.optimizer[-1] + costs.saved[-1])
    memory |= dict.fromkeys(draft.cpus or draft.devices, state)
    rooms = {name: machine.device(name).memory_bytes - machine.device(name).reserved_bytes for name in memory}
    return Estimate(time_s, memory, max(memory[name] / max(rooms[name], 1) for name in memory))
