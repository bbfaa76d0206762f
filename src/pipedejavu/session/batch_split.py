"""A batch of the user's own loop, divided into numbered microbatches."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pipedejavu.engine.padding import Padding
from pipedejavu.facts import InputError
from pipedejavu.facts.printable import tell
from pipedejavu.profile import ModelCut
from pipedejavu.program.share import divide
from pipedejavu.source.loss_reduction import Reduction
from pipedejavu.source.task import describe_form
from pipedejavu.source.user_batch import UserBatch


class BatchSplit:
    """A batch divided into microbatches with sizes in proportion to those of the plan."""

    def __init__(
        self,
        batch: UserBatch,
        sizes: Sequence[int],
        reduction: Reduction,
        cut: ModelCut | None = None,
        *,
        pads: bool = False,
    ):
        self.sizes, self.reduction, self.cut, self.pads = sizes, reduction, cut, pads
        self.forms: list[str] = []
        """The forms that batches had so far."""
        self.counts: list[int] = []
        """Samples or labels that count, per microbatch."""
        self.structure = ""
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
        if min(parts) < 1 and not self.pads:
            raise InputError(
                f"a batch of {batch.size} samples has fewer than the plan's {len(parts)} microbatches; use a larger"
                " batch or fewer microbatches"
            )
        if min(parts) < 1 and self.cut is not None and (name := _first_buffer(self.cut)):
            raise InputError(
                f"a batch of {batch.size} samples has fewer than the plan's {len(parts)} microbatches, and the samples"
                f" that would fill the others would also enter the model's buffer '{name}'; use a larger batch or fewer"
                " microbatches"
            )
        self._check_form(batch)
        self.batch, self.first = batch, first
        ends = [0, *accumulate(parts)]
        rows = [slice(*ends[n : n + 2]) if part else slice(1) for n, part in enumerate(parts)]
        self.parts = [batch.rows(some) for some in rows]
        self.is_padding = [part == 0 for part in parts]
        counts = [self.reduction.count(part.targets) for part in self.parts]
        self.counts = [0 if fills else count for fills, count in zip(self.is_padding, counts, strict=True)]
        if batch.num_items is not None and any(self.counts):
            self._divide_by(batch.num_items)
        if not sum(self.counts):
            raise InputError(
                f"none of the labels in a batch of {batch.size} samples counts: all are {self.reduction.ignored}; leave"
                " such batches out"
            )
        for cut in self.cuts:
            for count in {max(1, part) for part in parts}:
                cut.fit(batch.rows(slice(count)).inputs)

    def _divide_by(self, num_items: int) -> None:
        """Makes the counts add up to what the user's batch says that its loss is divided by."""
        difference = num_items - sum(self.counts)
        if difference and not self.pads:
            raise InputError(
                f"num_items_in_batch is {num_items}, and {sum(self.counts)} labels of the batch count, in several"
                " updates; leave it out, or use a plan that makes one update per step"
            )
        largest = self.counts.index(max(self.counts))
        self.counts[largest] += difference

    def _check_form(self, batch: UserBatch) -> None:
        """Raises InputError for other tensors than the first batch had; says once that lengths vary."""
        form = _form(batch, describe_form)
        if form in self.forms:
            return
        self.forms.append(form)
        structure = _form(batch, _structure)
        self.structure = self.structure or structure
        if structure != self.structure:
            self.forms.pop()
            raise InputError(
                f"a batch has {form}, where the first had {self.forms[0]}; give all batches tensors of as many"
                " dimensions and of one dtype"
            )
        if len(self.forms) > 1 and self.cut is not None and self.cut.method == "chain":
            self._try_chain(batch, form)
        if len(self.forms) == 2:
            tell(
                f"batches vary in shape: {form} after {self.forms[0]}; a model that is no chain is recorded once for"
                " each shape of a microbatch, and forecasts hold for the first (pad to a few lengths if steps are slow)"
            )

    def _try_chain(self, batch: UserBatch, form: str) -> None:
        """Runs copies of a chain's units on two samples of another form; raises InputError if one does not take it."""
        assert self.cut is not None
        value = deepcopy(self.cut.flat(batch.rows(slice(2)).inputs))  # units may work in place
        with torch.no_grad(), torch.random.fork_rng():
            for name, unit in self.cut.units:
                try:
                    value = deepcopy(unit)(value)
                except Exception as error:
                    self.forms.remove(form)
                    raise InputError(
                        f"a batch has {form}, where the first had {self.forms[0]}, and unit '{name}' does not take it:"
                        f" {error}"
                    ) from None

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
        targets = self.parts[microbatch - self.first].targets
        return Padding(targets) if self.is_padding[microbatch - self.first] else targets

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


def _first_buffer(cut: ModelCut) -> str | None:
    """Returns the name of a model's first saved buffer, such as a running mean; None if it has none."""
    for prefix, module in cut.model.named_modules():
        for name, _ in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                return str(name)
    return None


def _form(batch: UserBatch, describe: Callable[[Any], str]) -> str:
    return f"inputs of {describe(batch.inputs)}, targets of {describe(batch.targets)}"


def _structure(value: Any) -> str:
    """Returns the number of dimensions and the dtype of each of a value's tensors."""
    if isinstance(value, tuple | list | Mapping):
        return " and ".join(map(_structure, value.values() if isinstance(value, Mapping) else value))
    return f"{value.ndim} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
