"""Microbatches from data that lies on a worker's device from the start: training reads and copies no samples.

The worker of a first piece holds the inputs of all samples and that of a last piece the targets; others hold nothing.
The samples of a microbatch, and their order, are those of `SampleOrder`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipedejavu.engine.device import device_of, moved
from pipedejavu.facts import InputError
from pipedejavu.program import ActionKind, Program
from pipedejavu.source.task import SampleOrder, sample_indices
from pipedejavu.zoo.dataset import SampledDataset

_CHUNK = 256
"""Samples that are read at once."""


def reads_of(program: Program, worker: int) -> tuple[bool, bool]:
    """Returns whether a worker reads inputs, and whether it reads targets."""
    pieces = program.pieces_on[worker]
    scores = any(a.kind == ActionKind.EVAL for a in program.workers[worker].actions)
    return (
        scores or any(not program.inputs[piece] for piece in pieces),
        scores or any(not program.outputs[piece] for piece in pieces),
    )


def resident_bytes(order: SampleOrder, program: Program, worker: int) -> int:
    """Returns the bytes of the samples that a worker holds; raises InputError for data that cannot be held."""
    data = order.task.data
    if isinstance(data, SampledDataset):
        raise InputError(
            "--data-on device is for samples that stay the same, and this data is drawn anew in each update; leave it"
            " out"
        )
    if program.plan.prefetches_data:
        raise InputError(
            f"plan '{program.plan.name}' copies batches to the device ahead of their use, and --data-on device leaves"
            " none to copy; leave it out, or set order.prefetch to 0"
        )
    first = data.batch(range(1))
    for tensor in pytree.tree_leaves(first):
        if not isinstance(tensor, Tensor) or not tensor.ndim or len(tensor) != 1:
            form = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InputError(f"--data-on device needs tensors with a row per sample, and one sample has a {form} too")
    return len(data) * sum(
        _num_bytes(part) for part, is_read in zip(first, reads_of(program, worker), strict=True) if is_read
    )


def _num_bytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in pytree.tree_leaves(value))


class ResidentBatches:
    """The microbatches of a `SampleOrder`, gathered on the device that holds all samples."""

    def __init__(self, order: SampleOrder, program: Program, worker: int):
        self.order, self.device = order, device_of(program, worker)
        data, parts = order.task.data, list[tuple[Any, Any]]()
        self._size, count = len(data), order.task.count
        self._counts: Tensor | None = None
        """What each sample counts in the loss, on the host; None if each counts as one."""
        counts = []
        reads = reads_of(program, worker)
        for start in range(0, self._size, _CHUNK):
            inputs, targets = data.batch(range(start, min(start + _CHUNK, self._size)))
            parts.append((inputs if reads[0] else None, targets if reads[1] else None))
            if count is not len:
                counts += [
                    count(pytree.tree_map(lambda t, n=n: t[n : n + 1], targets))
                    for n in range(len(pytree.tree_leaves(targets)[0]))
                ]
        if counts:
            self._counts = torch.tensor(counts, device="cpu")
        self._inputs, self._targets = (
            moved(pytree.tree_map(lambda *rows: torch.cat(rows), *column), self.device) if is_read else None
            for column, is_read in zip(zip(*parts, strict=True), reads, strict=True)
        )

    def inputs(self, microbatch: int) -> Any:
        """Returns the inputs of the first unit."""
        if self._inputs is None:
            return self.order.inputs(microbatch)
        return self.order.cut.flat(self._gathered(self._inputs, microbatch))

    def targets(self, microbatch: int) -> Any:
        """Returns the targets of a microbatch."""
        return self.order.targets(microbatch) if self._targets is None else self._gathered(self._targets, microbatch)

    def length(self, microbatch: int) -> int:
        """Returns the number of samples."""
        return self.order.length(microbatch)

    def count(self, microbatch: int) -> int:
        """Returns the number of samples or tokens that count."""
        if self._counts is None:
            return self.length(microbatch)
        return int(self._counts[self._indices(microbatch)].sum())

    @property
    def num_changes(self) -> int:
        """How often the sizes of later microbatches have changed."""
        return self.order.num_changes

    def _indices(self, microbatch: int) -> Tensor:
        return sample_indices(self._size, self.order.seed, self.order.numbers(microbatch))

    def _gathered(self, whole: Any, microbatch: int) -> Any:
        indices = moved(self._indices(microbatch), self.device)
        return pytree.tree_map(lambda tensor: tensor.index_select(0, indices), whole)
