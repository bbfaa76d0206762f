"""A user's batch: inputs and targets, which can be sliced by sample.

Inputs and targets are tensors, or tuples, lists and dicts of them. Does not know how samples are assigned to
microbatches.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipedejavu.facts import InputError

_MANY = 5
"""With up to this many inputs of batch size, every choice of shared ones is tried; with more, at most one."""

_NUM_ITEMS = "num_items_in_batch"
"""The argument of transformers' models that divides a summed loss."""


def inputs_and_targets(batch: Any, *, has_own_loss: bool = False) -> tuple[Any, Any]:
    """Returns (inputs, targets) of a batch; a mapping holds the keyword arguments of a model that computes its loss.

    A list counts as a tuple, because `torch.utils.data` turns tuples into lists. If the model computes the loss, its
    `labels` argument is the target.
    """
    if isinstance(batch, Mapping):
        return dict(batch), _labels(batch)
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise InputError("a batch is (inputs, targets), or a mapping of arguments for a model that has its own loss")
    inputs, targets = batch
    if isinstance(inputs, Mapping):
        return dict(inputs), inputs["labels"] if has_own_loss and "labels" in inputs else targets
    return tuple(inputs) if isinstance(inputs, list) else inputs, targets


def _labels(batch: Mapping[str, Any]) -> Any:
    """Returns the targets of a mapping: its labels, or else any tensor, which has a row per sample."""
    if "labels" in batch:
        return batch["labels"]
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.ndim}
    rows = {len(value) for value in tensors.values()}
    if len(rows) != 1:
        rows_text = (
            ", ".join(f"'{name}' has {len(value)} rows" for name, value in tensors.items()) or "it has no tensor"
        )
        raise InputError(
            f"a batch is a mapping without 'labels', which does not say how many samples it has: {rows_text}; give"
            " (inputs, targets)"
        )
    return next(iter(tensors.values()))


def count_samples(targets: Any) -> int:
    """Returns the number of samples: the common number of rows of the target tensors."""
    rows = [len(leaf) if leaf.ndim else 0 for leaf in pytree.tree_leaves(targets) if isinstance(leaf, Tensor)]
    if not rows or len({*rows}) > 1 or not rows[0]:
        rows_text = " and ".join(map(str, dict.fromkeys(rows))) + " rows" if rows else "no tensor"
        raise InputError(
            f"the targets of a batch have {rows_text}; give tensors with one row for each sample, and what all samples"
            " share to the loss itself"
        )
    return rows[0]


@dataclass(frozen=True)
class UserBatch:
    """Inputs and targets of some samples."""

    inputs: Any
    targets: Any
    size: int
    """Number of samples."""
    per_sample: frozenset[str]
    """Names of inputs with one row per sample; all samples share the others."""
    has_own_loss: bool = False
    """Whether the model computes the loss."""
    num_items: int | None = None
    """What the loss is divided by, if the batch says so."""

    @classmethod
    def of(cls, batch: Any, per_sample: frozenset[str] | None = None, *, has_own_loss: bool = False) -> "UserBatch":
        """Reads a user's batch; by default, inputs with as many rows as the targets have one row per sample.

        A model that computes its loss may take `num_items_in_batch`, the labels that count in the whole batch. It is
        not passed to the model, which sees a microbatch at a time, and divides the sum of their losses.
        """
        inputs, targets = inputs_and_targets(batch, has_own_loss=has_own_loss)
        num_items = inputs.pop(_NUM_ITEMS, None) if has_own_loss and isinstance(inputs, dict) else None
        if num_items is not None and (num_items := int(num_items)) < 1:
            raise InputError(f"{_NUM_ITEMS} is {num_items}; leave batches out in which no label counts")
        size, leaves = count_samples(targets), _named(inputs)
        rows = {name: len(leaf) if leaf.ndim else 0 for name, leaf in leaves if isinstance(leaf, Tensor)}
        if per_sample is None:
            per_sample = frozenset(name for name, count in rows.items() if count == size)
        for name in sorted(per_sample & rows.keys()):
            if rows[name] != size:
                raise InputError(
                    f"input {name} has {rows[name]} rows in a batch of {size} samples, and had one for each sample in"
                    " the sample batch; give it a row for each sample"
                )
        return cls(inputs, targets, size, per_sample, has_own_loss, num_items)

    def rows(self, indices: slice | Sequence[int]) -> "UserBatch":
        """Returns the samples at some indices; shared inputs stay whole."""

        def pick(path: pytree.KeyPath, leaf: Any) -> Any:
            return _picked(leaf, indices) if _name(path) in self.per_sample else leaf

        inputs = pytree.tree_map_with_path(pick, self.inputs)
        targets = pytree.tree_map_only(Tensor, lambda leaf: _picked(leaf, indices), self.targets)
        size = len(range(self.size)[indices]) if isinstance(indices, slice) else len(indices)
        return replace(self, inputs=inputs, targets=targets, size=size)

    def readings(self) -> Iterator["UserBatch"]:
        """Yields possible interpretations, most likely first: a shared input may have the batch size by chance."""
        names = sorted(self.per_sample)
        most = len(names) if len(names) <= _MANY else 2
        for count in range(max(1, most)):
            for shared in combinations(names, count):
                yield replace(self, per_sample=self.per_sample - {*shared})


def few_tokens(batch: UserBatch, count: int, ignored: int) -> UserBatch | None:
    """Returns `count` neighbouring tokens of each sample, those of which the most labels count.

    Returns None if the batch does not look like tokens: the targets are integers, a row per sample, and every tensor
    with a row per sample is an integer or a truth value for each token.
    """
    targets, leaves = batch.targets, _named(batch.inputs)
    if not isinstance(targets, Tensor) or targets.ndim != 2 or targets.dtype not in (torch.int64, torch.int32):
        return None
    length = targets.shape[1]
    tensors = [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]
    is_tokens = all(t.shape == targets.shape and not t.is_floating_point() for t in tensors)
    if length <= count or not tensors or not is_tokens or any(name not in batch.per_sample for name, _ in leaves):
        return None
    valid = torch.nn.functional.pad(targets.ne(ignored).cumsum(1), (1, 0))
    begin = int((valid[:, count:] - valid[:, :-count]).amin(0).argmax())

    def shortened(leaf: Tensor) -> Tensor:
        return leaf[:, begin : begin + count]

    inputs = pytree.tree_map_only(Tensor, shortened, batch.inputs)
    return replace(batch, inputs=inputs, targets=shortened(targets))


def _named(inputs: Any) -> list[tuple[str, Any]]:
    return [(_name(path), leaf) for path, leaf in pytree.tree_flatten_with_path(inputs)[0]]


def _name(path: pytree.KeyPath) -> str:
    return pytree.keystr(path) or "of the model"


def _picked(leaf: Tensor, indices: slice | Sequence[int]) -> Tensor:
    return leaf[indices] if isinstance(indices, slice) else leaf[torch.tensor([*indices], device=leaf.device)]
