"""From options to what the engine runs: the model as a job, the data as microbatches by number."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from pipedejavu.engine import AdamW, Batches, Byzantine, Job, Optimizer, Sgd
from pipedejavu.facts import InputError
from pipedejavu.profile import ModelCut, cut_model
from pipedejavu.program import ActionKind, Program, ValueKind
from pipedejavu.run.options import TrainOptions
from pipedejavu.source.model_source import open_task
from pipedejavu.source.precision import check_parameters
from pipedejavu.zoo import Dataset, Task, order

MOST_KEPT = 64
"""Microbatches whose samples stay where nothing says that fewer do."""
_MOST_COUNTS = 4096


class Prepared(NamedTuple):
    """What the engine runs."""

    job: Job
    batches: "SampleOrder"


def prepare(options: TrainOptions, sizes: Sequence[int], begins: Sequence[int] = ()) -> Prepared:
    """Builds the model, cuts it for microbatches of so many samples, where the plan says it, and opens its data."""
    torch.set_default_dtype(getattr(torch, options.dtype))
    task = open_task(options.model, seed=options.seed, data=options.data, weights=options.weights)
    check_parameters(task.model)
    cut = cut_model(task.model, task.data.batch(range(sizes[0]))[0], begins)
    optimizer: Optimizer = Sgd(lr=options.lr, weight_decay=options.weight_decay, momentum=options.momentum)
    if options.optimizer == "adamw":
        optimizer = AdamW(lr=options.lr, weight_decay=options.weight_decay)
    job = Job(
        units=cut.units,
        loss=loss_of(cut, task.loss),
        optimizer=optimizer,
        seed=options.seed,
        clip_norm=options.clip_norm,
        on_nan=options.on_nan,
        max_consecutive_skips=options.max_consecutive_skips,
        byzantine=Byzantine.parse(options.byzantine) if options.byzantine else None,
    )
    return Prepared(job, SampleOrder(task, cut, sizes, options.seed))


def loss_of(cut: ModelCut, loss: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
    """Returns a loss on the model's output as one on what the last unit returns."""
    return lambda value, target: loss(cut.output(value), target)


class SampleOrder:
    """Microbatches by number: sample n of the run is a function of the seed and n alone.

    `sizes` are the samples of each microbatch of an update; they may change from one update on, but not their number
    nor their sum. Below 0 are samples that a server scores contributions on: the data once more, in orders of its own.
    """

    def __init__(self, task: Task, cut: ModelCut, sizes: Sequence[int], seed: int):
        self.task, self.cut, self.seed = task, cut, seed
        self._counts: dict[int, int] = {}
        """Of microbatches that were made; they outlast the samples."""
        self.keep(MOST_KEPT)
        self._changes: list[tuple[int, tuple[int, ...]]] = []
        self._start = (0, 0)
        self.change(0, sizes)

    def keep(self, count: int) -> None:
        """Says of how many microbatches the samples stay, once they are made, for who asks for them again."""
        self._batch = lru_cache(maxsize=count)(self._make)

    def start(self, update: int, samples: int) -> None:
        """Lets an update begin with the sample of this number; those before it were trained on, under any plan."""
        self._start = (update, samples)

    def samples(self, update: int) -> int:
        """Returns the number of the sample that an update begins with."""
        first, samples = self._start
        return samples + (update - first) * sum(self._changes[0][1])

    def change(self, update: int, sizes: Sequence[int]) -> None:
        """Gives the microbatches other sizes from an update on, which must not have begun."""
        if self.cut.way != "chain":  # which takes any size
            for size in set(sizes):
                self.first(size)
        self._changes.append((update, tuple(sizes)))

    def first(self, count: int) -> tuple[Any, Any]:
        """Returns the first samples of the data, as the first unit and the loss read them."""
        inputs, targets = self.task.data.batch(range(count))
        self.cut.fit(inputs)
        return self.cut.flat(inputs), targets

    def inputs(self, microbatch: int) -> Any:
        """Returns what the first unit reads."""
        return self.cut.flat(self._batch(microbatch)[0])

    def own_inputs(self, microbatch: int) -> Any:
        """Returns what the user's model reads."""
        return self._batch(microbatch)[0]

    def targets(self, microbatch: int) -> Any:
        """Returns what the loss compares with."""
        return self._batch(microbatch)[1]

    def length(self, microbatch: int) -> int:
        """Returns how many samples there are."""
        return len(self.numbers(microbatch))

    def count(self, microbatch: int) -> int:
        """Returns how many samples or tokens count; where that is every sample, nobody makes them to know it."""
        if self.task.count is len:
            return self.length(microbatch)
        known = self._counts.get(microbatch)
        return self.task.count(self.targets(microbatch)) if known is None else known

    def numbers(self, microbatch: int) -> range:
        """Returns the numbers of a microbatch's samples in the run."""
        if microbatch < 0:
            size = self._changes[0][1][-1]
            return range(microbatch * size, (microbatch + 1) * size)
        update, place = divmod(microbatch, len(self._changes[0][1]))
        sizes = next(sizes for first, sizes in reversed(self._changes) if first <= update)
        start = self.samples(update) + sum(sizes[:place])
        return range(start, start + sizes[place])

    def _make(self, microbatch: int) -> tuple[Any, Any]:
        inputs, targets = draw(self.task.data, self.seed, self.numbers(microbatch))
        if self.task.count is not len:
            self._counts[microbatch] = self.task.count(targets)
            if len(self._counts) > _MOST_COUNTS:
                self._counts.pop(next(iter(self._counts)), None)
        return inputs, targets


def num_kept(program: Program, worker: int) -> int:
    """Returns of how many microbatches a worker must keep the samples to make none twice.

    Its first piece reads inputs, its last one targets, and both again where they recompute.
    """
    own = program.workers[worker]
    if own.picks_ready or any(
        a.kind == ActionKind.FETCH and a.what == ValueKind.BATCH for a in own.actions
    ):  # in no order that is known
        return MOST_KEPT
    ends = {piece for piece in range(len(program.pieces)) if not program.inputs[piece] or not program.outputs[piece]}
    reads = [
        a.microbatch for a in own.actions if a.kind in (ActionKind.FORWARD, ActionKind.RECOMPUTE) and a.piece in ends
    ]
    last, most = dict[int, int](), 1
    for position, microbatch in enumerate(reads):
        if microbatch in last:
            most = max(most, len({*reads[last[microbatch] : position]}))
        last[microbatch] = position
    return min(MOST_KEPT, most)


def draw(data: Dataset, seed: int, samples: range) -> tuple[Any, Any]:
    """Returns samples of a run by their numbers: each epoch goes through the data in an order of its own."""
    numbers = torch.tensor(samples)
    epochs = torch.div(numbers, len(data), rounding_mode="floor")
    parts = [
        _order(seed, epoch, len(data))[numbers[epochs == epoch] % len(data)] for epoch in sorted({*epochs.tolist()})
    ]
    return data.batch(torch.cat(parts))


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, size: int) -> torch.Tensor:
    return order(seed, epoch, size)


class SteadyBatches:
    """Microbatches that are all alike: one whose shape or type differs from the first is refused.

    The wire says the form of a value once, and the forecast holds for one form only.
    """

    def __init__(self, batches: Batches):
        self.batches = batches
        self.forms: dict[str, str] = {}

    def inputs(self, microbatch: int) -> Any:
        """Returns what the model reads."""
        return self._checked("inputs", microbatch, self.batches.inputs(microbatch))

    def targets(self, microbatch: int) -> Any:
        """Returns what the loss compares with."""
        return self._checked("targets", microbatch, self.batches.targets(microbatch))

    def length(self, microbatch: int) -> int:
        """Returns how many samples there are."""
        return self.batches.length(microbatch)

    def count(self, microbatch: int) -> int:
        """Returns how many samples or tokens count."""
        return self.batches.count(microbatch)

    def _checked(self, what: str, microbatch: int, value: Any) -> Any:
        form = describe_form(value)
        first = self.forms.setdefault(what, form)
        if form != first:
            raise InputError(
                f"the {what} of microbatch {microbatch} are {form} where those before it were {first}; give all"
                " batches one shape and one dtype"
            )
        return value


def describe_form(value: Any) -> str:
    """Returns the shape of one sample and the dtype of each of a value's tensors."""
    if isinstance(value, tuple | list | Mapping):
        return " and ".join(map(describe_form, value.values() if isinstance(value, Mapping) else value))
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{'×'.join(map(str, value.shape[1:])) or 'single'} {str(value.dtype).removeprefix('torch.')}"
