"""The filters that each replica trains in each update: a function of the seed, the update, and the replica's budget.

A budget is a share of the multiplications of the whole model. The choice is the vector of a table with the highest cost
within it, and chance picks the filters. Budgets are the plan's; if the plan is controlled, a replica whose updates take
longer than its first ones has less, and the choices are noted in the log.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from statistics import median
from typing import NamedTuple

import torch

from pipedejavu.engine.job import Batches, Job, Masked
from pipedejavu.engine.masked_optimizer import MaskedOptimizer
from pipedejavu.engine.optimizer import Optimizer, Tensors
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.summed_piece import add_up
from pipedejavu.engine.unit_random import mixed
from pipedejavu.engine.wire import Wire
from pipedejavu.facts import InputError
from pipedejavu.plan import Plan
from pipedejavu.program import Program
from pipedejavu.runtime.axis_rule import shape_of
from pipedejavu.runtime.filter_check import check_narrowed
from pipedejavu.runtime.filter_layout import FilterLayout, find_filters
from pipedejavu.runtime.kept_filters import KeptFilters, merge, shares

LEVELS = 64
"""Vectors with one share for all groups, if the plan has none."""
_NUM_FIRST = 4
"""Updates, after a first one that warms up, whose times are those of an undisturbed replica."""
_SALT = 0x6D61736B
"""Keeps the seeds of filters apart from those of units."""


class _Choice(NamedTuple):
    """A vector of the table."""

    counts: tuple[int, ...]
    """Filters that remain per group."""
    cost: float


class FilterFinder:
    """The filters of a job's model, found once per process, when the shapes of its samples are known."""

    def __init__(self, plan: Plan, job: Job, batches: Batches):
        self.plan, self.job, self.batches = plan, job, batches
        self._layout: FilterLayout | None = None

    def layout(self, microbatch: int) -> FilterLayout:
        """Returns the filters; a microbatch has the shapes."""
        if self._layout is None:
            if self.job.graphs is None:
                raise InputError(f"plan '{self.plan.name}' leaves filters out, and this job has no graphs of its units")
            inputs = self.batches.inputs(microbatch)
            graphs = self.job.graphs(self.job.units, inputs)
            layout = find_filters(self.job.units, graphs)
            check_narrowed(self.job.units, layout, inputs, [shape_of(node) for node in graphs[-1].outputs])
            self._layout = layout
        return self._layout


def vectors_of(plan: Plan, layout: FilterLayout) -> list[_Choice]:
    """Returns the table of a plan by rising cost, vectors that keep the same numbers of filters once.

    Raises InputError if a budget is too small for all of them.
    """
    groups = len(layout.groups)
    drops = plan.feed.drops or tuple((level / LEVELS,) * groups for level in range(LEVELS))
    if len(drops[0]) != groups:
        raise InputError(
            f"the vectors of feed.drops have {len(drops[0])} shares, and the model has {groups} groups of filters"
            f" ({', '.join(group.name for group in layout.groups)}); search for vectors of this model"
        )
    pairs = sorted({(layout.cost(counts), counts) for counts in map(layout.counts, drops)})
    table = [_Choice(counts, cost) for cost, counts in pairs]
    for row in (plan.feed.budgets or (), *plan.feed.later_budgets):
        for replica, budget in enumerate(row):
            if budget < table[0].cost:
                raise InputError(
                    f"replica {replica} has a budget of {budget:g}, and the smallest vector of the plan takes"
                    f" {table[0].cost:.3g} of the multiplications of the whole model; give it at least that"
                )
    return table


def check_filters(plan: Plan, job: Job, batches: Batches) -> None:
    """Raises InputError if the model has no filters that the plan can leave out to fit its budgets."""
    vectors_of(plan, FilterFinder(plan, job, batches).layout(0))


class Pace:
    """What share of its budget a replica can use, by the times of its updates."""

    def __init__(self) -> None:
        self.share = 1.0
        self._first: list[float] = []
        self._recent: list[float] = []

    def note(self, seconds: float, budget: float) -> None:
        """Notes the time of an update for which the plan gave a budget."""
        times = self._first if len(self._first) <= _NUM_FIRST else self._recent
        times.append(seconds / budget)

    def settle(self) -> None:
        """Changes the share by the recent times, towards the time of the first updates."""
        if self._recent:
            self.share = min(1.0, self.share * median(self._first[1:]) / median(self._recent))
            self._recent.clear()


def masks_of_replay(
    program: Program, job: Job, batches: Batches, runners: Sequence[PieceRunner]
) -> "FilterMasks | None":
    """Returns the masks of a replay, with which its runners run; None if the plan leaves no filters out."""
    if program.plan.feed.kind != "mask":
        return None
    masks = FilterMasks(program, job.seed, FilterFinder(program.plan, job, batches))
    masks.prepare(0)
    for runner in runners:
        runner.filters = masks.of_microbatch
    return masks


class FilterMasks:
    """The masks of one worker's program; a replay gets the choices from the logs."""

    def __init__(self, program: Program, seed: int, finder: FilterFinder):
        self.program, self.plan, self.seed, self.finder = program, program.plan, seed, finder
        self.choices: dict[tuple[int, int], int] = {}
        """By replica and update, the number of the vector in the table."""
        self.note: Callable[[Masked], object] = lambda _: None
        """Called with each choice that this worker makes."""
        self._pace, self._started_s = Pace(), dict[int, float]()
        self._known = lru_cache(maxsize=2 * program.num_replicas * program.plan.reduce.period)(self._kept)

    def prepare(self, microbatch: int) -> None:
        """Finds the filters before the first round."""
        self.layout = self.finder.layout(microbatch)
        self.table = vectors_of(self.plan, self.layout)

    def of_microbatch(self, number: int) -> KeptFilters:
        """Returns the filters that the replica of a microbatch trains; a worker's first such call begins its update."""
        update, position = divmod(number, self.program.update_size)
        replica = position // self.plan.feed.microbatches
        if (replica, update) not in self.choices:
            if self.plan.feed.is_controlled:
                self._started_s[update] = time.perf_counter()
            self.choices[replica, update] = self._choose(replica, update)
            self.note(Masked(replica, update, self.choices[replica, update]))
        return self.kept(replica, update)

    def _choose(self, replica: int, update: int) -> int:
        share = self._pace.share if self.plan.feed.is_controlled else 1.0
        return self._best(max(self.table[0].cost, share * self._budget(replica, update)))

    def _best(self, budget: float) -> int:
        return max(n for n, choice in enumerate(self.table) if choice.cost <= budget)

    def _budget(self, replica: int, update: int) -> float:
        return self.plan.feed.budgets_at(update // self.plan.reduce.period)[replica]

    def kept(self, replica: int, update: int) -> KeptFilters:
        """Returns the filters that a replica trains in an update; of those before a resume, by the plan's budget."""
        choice = self.choices.get((replica, update))
        return self._known(replica, update, self._best(self._budget(replica, update)) if choice is None else choice)

    def _kept(self, replica: int, update: int, choice: int) -> KeptFilters:
        numbers = range(len(self.layout.groups))
        seeds = [mixed(self.seed, _SALT, update, replica, group) for group in numbers]
        return KeptFilters(self.layout, self.table[choice].counts, seeds)

    def take(self, events: Iterable[Masked]) -> None:
        """Takes choices from logs; raises InputError for one that the plan's budget does not lead to."""
        for event in events:
            expected = self._best(self._budget(event.replica, event.update))
            is_wrong = event.choice > expected if self.plan.feed.is_controlled else event.choice != expected
            if is_wrong or not 0 <= event.choice < len(self.table):
                raise InputError(
                    f"the run chose another vector than {expected}, to which the plan's budget leads: {event}"
                )
            self.choices[event.replica, event.update] = event.choice

    def optimizer(self, optimizer: Optimizer, replica: int, update: int) -> MaskedOptimizer:
        """Returns the optimizer of an update; the passes of the update have ended."""
        return MaskedOptimizer(optimizer, self.kept(replica, update))

    def note_time(self, replica: int, update: int, device: torch.device) -> None:
        """Notes how long the passes of an update took, if budgets are controlled; waits for a GPU."""
        if update in self._started_s:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            self._pace.note(time.perf_counter() - self._started_s.pop(update), self._budget(replica, update))

    def average(self, wire: Wire, group: str, weights: Tensors, replica: int, update: int) -> Tensors:
        """Returns the mean of all replicas' weights, each entry by the updates that trained it in each replica."""
        updates = self._since_average(update)
        if self.plan.feed.is_controlled:
            self._exchange(wire, group, updates, replica, next(iter(weights.values())).device)
        kept = [[self.kept(q, u) for u in updates] for q in range(self.program.num_replicas)]
        parts = {name: shares(name, weight, kept, replica) for name, weight in weights.items()}
        self._pace.settle()
        return add_up(wire, parts, group)

    def mean(self, weights: Sequence[Tensors], update: int) -> Tensors:
        """Returns the mean of the weights of all replicas, in the order of the replicas."""
        updates = self._since_average(update)
        return merge(weights, [[self.kept(q, u) for u in updates] for q in range(self.program.num_replicas)])

    def _exchange(self, wire: Wire, group: str, updates: Sequence[int], replica: int, device: torch.device) -> None:
        """Learns the choices of the other replicas."""
        table = torch.zeros(self.program.num_replicas, len(updates), dtype=torch.float32, device=device)
        for column, update in enumerate(updates):
            table[replica, column] = self.choices.get((replica, update), -1)
        rows = add_up(wire, {"choices": table}, group)["choices"].tolist()
        for other, row in enumerate(rows):
            self.choices |= {(other, u): int(n) for u, n in zip(updates, row, strict=True) if n >= 0}

    def _since_average(self, update: int) -> list[int]:
        """Returns the updates that an average after `update` covers."""
        steps, period = self.plan.steps, self.plan.reduce.period
        first = update
        while first and ((first - 1) % steps + 1) % period:
            first -= 1
        return [*range(first, update + 1)]
