"""Turns options into what the engine runs: the model as a job, the data as numbered microbatches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from pipedejavu.engine import AdamW, Byzantine, Job, Optimizer, Sgd
from pipedejavu.engine.batch_loader import ReadableAhead
from pipedejavu.facts import InputError
from pipedejavu.facts.start_phase import START
from pipedejavu.profile import ModelCut, cut_model
from pipedejavu.profile.unit_graph import unit_graphs
from pipedejavu.program import ActionKind, Program
from pipedejavu.run.options import TrainOptions
from pipedejavu.source.chosen_data import data_choice
from pipedejavu.source.model_source import open_task
from pipedejavu.source.precision import check_parameters
from pipedejavu.source.rate_schedule import rate_schedule
from pipedejavu.source.trained_part import trained_part
from pipedejavu.zoo import Dataset, Task, order
from pipedejavu.zoo.dataset import SampledDataset

MOST_KEPT = 64
"""Default number of microbatches whose samples are cached."""
_MOST_COUNTS = 4096


class Prepared(NamedTuple):
    """The job and the microbatches that the engine runs."""

    job: Job
    batches: "SampleOrder"


def prepare(options: TrainOptions, sizes: Sequence[int], begins: Sequence[int] = ()) -> Prepared:
    """Builds the model, cuts it into units for microbatches of these sizes, and opens its data.

    `begins` are the unit boundaries that the plan asks for.
    """
    torch.set_default_dtype(getattr(torch, options.parameter_dtype))
    with START.phase("build"):
        task = open_task(
            options.model,
            seed=options.seed,
            data=data_choice(options),
            weights=options.weights,
            part=trained_part(options),
        )
    check_parameters(task.model)
    cut = cut_model(task.model, task.data.batch(range(sizes[0]))[0], begins)
    optimizer = _optimizer(options)
    job = Job(
        units=cut.units,
        loss=loss_of(cut, task.loss),
        optimizer=optimizer,
        seed=options.seed,
        clip_norm=options.clip_norm,
        on_nan=options.on_nan,
        max_consecutive_skips=options.max_consecutive_skips,
        byzantine=Byzantine.parse(options.byzantine) if options.byzantine else None,
        graphs=unit_graphs,
    )
    return Prepared(job, SampleOrder(task, cut, sizes, options.seed))


def reorder(prepared: Prepared, options: TrainOptions, sizes: Sequence[int]) -> Prepared:
    """Returns a model that was opened for other options of the run, with its samples in microbatches of these sizes.

    The options may differ in what changes neither the model nor its data.
    """
    job, batches = prepared
    job = replace(
        job,
        optimizer=_optimizer(options),
        clip_norm=options.clip_norm,
        on_nan=options.on_nan,
        max_consecutive_skips=options.max_consecutive_skips,
        byzantine=Byzantine.parse(options.byzantine) if options.byzantine else None,
    )
    return Prepared(job, SampleOrder(batches.task, batches.cut, sizes, options.seed))


def _optimizer(options: TrainOptions) -> Optimizer:
    factor = rate_schedule(options.schedule, options.warmup, options.steps)
    if options.optimizer == "adamw":
        if options.momentum:
            raise InputError(f"--momentum {options.momentum:g} is for sgd, and the optimizer is adamw; leave it out")
        return AdamW(lr=options.lr, weight_decay=options.weight_decay, schedule=factor)
    return Sgd(lr=options.lr, weight_decay=options.weight_decay, momentum=options.momentum, schedule=factor)


def loss_of(cut: ModelCut, loss: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
    """Returns the loss as a function of the last unit's output."""
    return lambda value, target: loss(cut.output(value), target)


class SampleOrder:
    """Numbered microbatches; sample n of the run depends only on the seed and n.

    `sizes` are the samples per microbatch of an update; they may change between updates, but not their number or sum.
    Negative numbers are the samples on which a server scores contributions: the same data in separate orders.
    """

    def __init__(self, task: Task, cut: ModelCut, sizes: Sequence[int], seed: int):
        self.task, self.cut, self.seed = task, cut, seed
        self._counts: dict[int, int] = {}
        """Item counts of microbatches, kept longer than their samples."""
        self.keep(MOST_KEPT)
        self._changes: list[tuple[int, tuple[int, ...]]] = []
        self._start = (0, 0)
        self.change(0, sizes)

    def keep(self, count: int) -> None:
        """Sets the number of microbatches whose samples are cached."""
        self._cached = lru_cache(maxsize=count)(self._make)

    def start(self, update: int, samples: int) -> None:
        """Sets the first sample of an update; earlier samples were trained on before, possibly under another plan."""
        self._start = (update, samples)

    def samples(self, update: int) -> int:
        """Returns the number of the first sample of an update."""
        first, samples = self._start
        return samples + (update - first) * sum(self._changes[0][1])

    def change(self, update: int, sizes: Sequence[int]) -> None:
        """Changes the microbatch sizes from an update on, which must not have started."""
        if self.cut.method != "chain":  # a chain takes any size
            for size in set(sizes):
                self.first(size)
        self._changes.append((update, tuple(sizes)))

    @property
    def num_changes(self) -> int:
        """How often the sizes have changed."""
        return len(self._changes) - 1

    def _batch(self, microbatch: int) -> tuple[Any, Any]:
        """Returns a microbatch; one that was made ahead under other sizes is made again."""
        return self._cached(microbatch, len(self._changes))

    def first(self, count: int) -> tuple[Any, Any]:
        """Returns the first samples of the data as (inputs of the first unit, targets)."""
        inputs, targets = self.task.data.batch(range(count))
        self.cut.fit(inputs)
        return self.cut.flat(inputs), targets

    def inputs(self, microbatch: int) -> Any:
        """Returns the inputs of the first unit."""
        return self.cut.flat(self._batch(microbatch)[0])

    def own_inputs(self, microbatch: int) -> Any:
        """Returns the inputs of the user's model."""
        return self._batch(microbatch)[0]

    def targets(self, microbatch: int) -> Any:
        """Returns the targets of a microbatch."""
        return self._batch(microbatch)[1]

    def length(self, microbatch: int) -> int:
        """Returns the number of samples."""
        return len(self.numbers(microbatch))

    def count(self, microbatch: int) -> int:
        """Returns how many samples or tokens count; reads the data only if that depends on the targets."""
        if self.task.count is len:
            return self.length(microbatch)
        known = self._counts.get(microbatch)
        return self.task.count(self.targets(microbatch)) if known is None else known

    def numbers(self, microbatch: int) -> range:
        """Returns the numbers of a microbatch's samples in the run."""
        if microbatch < 0:
            size = self._changes[0][1][-1]
            return range(microbatch * size, (microbatch + 1) * size)
        update, index = divmod(microbatch, len(self._changes[0][1]))
        sizes = next(sizes for first, sizes in reversed(self._changes) if first <= update)
        start = self.samples(update) + sum(sizes[:index])
        return range(start, start + sizes[index])

    def _make(self, microbatch: int, _num_changes: int) -> tuple[Any, Any]:
        step = microbatch // len(self._changes[0][1])
        inputs, targets = draw(self.task.data, self.seed, self.numbers(microbatch), step)
        if self.task.count is not len:
            self._counts[microbatch] = self.task.count(targets)
            if len(self._counts) > _MOST_COUNTS:
                self._counts.pop(next(iter(self._counts)), None)
        return inputs, targets


def num_kept(program: Program, worker: int) -> int:
    """Returns the number of microbatches a worker must cache to read the samples of each only once.

    The first piece reads inputs, the last piece targets, and both read them again when they recompute.
    """
    schedule = program.workers[worker]
    if schedule.picks_ready:  # order unknown
        return MOST_KEPT
    ahead = program.plan.order.prefetch if program.plan.prefetches_data else 0
    ends = {piece for piece in range(len(program.pieces)) if not program.inputs[piece] or not program.outputs[piece]}
    reading = (ActionKind.FORWARD, ActionKind.RECOMPUTE)
    reads = [a.microbatch for a in schedule.actions if a.kind in reading and a.piece in ends]
    last, most = dict[int, int](), 1
    for position, microbatch in enumerate(reads):
        if microbatch in last:
            most = max(most, len({*reads[last[microbatch] : position]}))
        last[microbatch] = position
    return min(MOST_KEPT, most + 2 * ahead)


def draw(data: Dataset, seed: int, samples: range, step: int = 0) -> tuple[Any, Any]:
    """Returns samples of a run by number; each epoch has its own random order, and some data draws anew in each step.

    The step counts the updates of all epochs, so that it fixes the epoch too.
    """
    indices = sample_indices(len(data), seed, samples)
    return data.drawn(indices, step) if isinstance(data, SampledDataset) else data.batch(indices)


def sample_indices(size: int, seed: int, samples: range) -> torch.Tensor:
    """Returns which samples of a data set the numbered samples of a run are."""
    numbers = torch.tensor(samples)
    epochs = torch.div(numbers, size, rounding_mode="floor")
    parts = [_order(seed, epoch, size)[numbers[epochs == epoch] % size] for epoch in sorted({*epochs.tolist()})]
    return torch.cat(parts)


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, size: int) -> torch.Tensor:
    return order(seed, epoch, size)


class SteadyBatches:
    """Checks that all microbatches have the shapes and dtypes of the first, and raises InputError otherwise.

    Workers exchange the form of a value only once, and the forecast holds for one form.
    """

    def __init__(self, batches: ReadableAhead):
        self.batches = batches
        self.forms: dict[str, str] = {}

    def inputs(self, microbatch: int) -> Any:
        """Returns the inputs of a microbatch."""
        return self._checked("inputs", microbatch, self.batches.inputs(microbatch))

    def targets(self, microbatch: int) -> Any:
        """Returns the targets of a microbatch."""
        return self._checked("targets", microbatch, self.batches.targets(microbatch))

    def length(self, microbatch: int) -> int:
        """Returns the number of samples."""
        return self.batches.length(microbatch)

    def count(self, microbatch: int) -> int:
        """Returns the number of samples or tokens that count."""
        return self.batches.count(microbatch)

    @property
    def num_changes(self) -> int:
        """How often the sizes of later microbatches have changed."""
        return self.batches.num_changes

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
