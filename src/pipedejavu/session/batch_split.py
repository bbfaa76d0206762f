"""A batch of the user's own loop, divided into numbered microbatches."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from pipedejavu.facts import InputError
from pipedejavu.profile import ModelCut
from pipedejavu.program.share import divide
from pipedejavu.source.loss_reduction import Reduction
from pipedejavu.source.task import describe_form
from pipedejavu.source.user_batch import UserBatch


class BatchSplit:
    """A batch divided into microbatches with sizes in proportion to those of the plan."""

    def __init__(self, batch: UserBatch, sizes: Sequence[int], reduction: Reduction, cut: ModelCut | None = None):
        self.sizes, self.reduction, self.cut, self.form = sizes, reduction, cut, ""
        self.cuts = [cut] if cut is not None else []
        """The cuts whose units run the microbatches; each worker has a copy."""
        self.held_out: BatchSplit | None = None
        """The batch whose last microbatch scores contributions; negative microbatch numbers stand for it."""
        self._take(batch, first=0)

    def take(self, batch: Any, first: int) -> None:
        """Replaces the batch; its first microbatch gets the number `first`."""
        self._take(UserBatch.of(batch, self.batch.per_sample, has_own_loss=self.batch.has_own_loss), first)

    def _take(self, batch: UserBatch, first: int) -> None:
        parts = divide(batch.size, self.sizes)
        if min(parts) < 1:
            raise InputError(
                f"a batch of {batch.size} samples has fewer than the plan's {len(parts)} microbatches; use a larger"
                " batch or fewer microbatches"
            )
        form = f"inputs of {describe_form(batch.inputs)}, targets of {describe_form(batch.targets)}"
        if form != (self.form or form):
            raise InputError(
                f"a batch has {form}, where the sample had {self.form}; give all batches one shape and one dtype"
            )
        self.batch, self.first, self.form = batch, first, form
        ends = [0, *accumulate(parts)]
        self.parts = [batch.rows(slice(*ends[n : n + 2])) for n in range(len(parts))]
        self.counts = [self.reduction.count(part.targets) for part in self.parts]
        if not sum(self.counts):
            raise InputError(
                f"none of the labels in a batch of {batch.size} samples counts: all are {self.reduction.ignored}; leave"
                " such batches out"
            )
        for cut in self.cuts:
            for count in set(parts):
                cut.fit(batch.rows(slice(count)).inputs)

    @property
    def size(self) -> int:
        """Samples per batch."""
        return self.batch.size

    def inputs(self, microbatch: int) -> Any:
        """Returns the inputs of the first piece."""
        assert self.cut is not None
        if microbatch < 0 and self.held_out is not None:
            return self.held_out.inputs(len(self.sizes) - 1)
        return self.cut.flat(self.own_inputs(microbatch))

    def own_inputs(self, microbatch: int) -> Any:
        """Returns the inputs of the user's model."""
        return self.parts[microbatch - self.first].inputs

    def own_head(self, count: int) -> Any:
        """Returns the first `count` samples as inputs of the user's model."""
        return self.batch.rows(slice(count)).inputs

    def head(self, count: int) -> tuple[Any, Any]:
        """Returns the first `count` samples as inputs of the first unit, and their targets."""
        assert self.cut is not None
        rows = self.batch.rows(slice(count))
        self.cut.fit(rows.inputs)
        return self.cut.flat(rows.inputs), rows.targets

    def targets(self, microbatch: int) -> Any:
        """Returns the targets of the loss."""
        if microbatch < 0 and self.held_out is not None:
            return self.held_out.targets(len(self.sizes) - 1)
        return self.parts[microbatch - self.first].targets

    def length(self, microbatch: int) -> int:
        """Returns the number of samples in a microbatch."""
        if microbatch < 0 and self.held_out is not None:
            return self.held_out.length(len(self.sizes) - 1)
        return self.parts[microbatch - self.first].size

    def count(self, microbatch: int) -> int:
        """Returns how many samples, or labels that are not ignored, the loss of a microbatch adds up."""
        if microbatch < 0 and self.held_out is not None:
            return self.held_out.count(len(self.sizes) - 1)
        return self.counts[microbatch - self.first]
