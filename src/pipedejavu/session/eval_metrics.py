"""Metrics of an evaluation: loss, perplexity, accuracy and the user's functions, as sums over batches."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipedejavu.facts import InputError
from pipedejavu.session.trainer_ranks import TrainerRanks
from pipedejavu.source.loss_reduction import Reduction

Metric = Callable[[Any, Any], Any]
"""Takes the model's output and the targets of a batch; returns its mean over the samples, or a pair (sum, count)."""

_RESERVED = frozenset(("loss", "perplexity", "accuracy", "samples"))


def check_metrics(metrics: Mapping[str, Metric]) -> None:
    """Raises InputError for metrics that are no functions, or that have the name of a built-in one."""
    for name, metric in metrics.items():
        if name in _RESERVED:
            raise InputError(f"a metric is called '{name}', which evaluate() computes itself; give it another name")
        if not callable(metric):
            raise InputError(
                f"the metric '{name}' is a {type(metric).__name__}; give a function of (output, targets) that returns a"
                " mean over the samples, or (sum, count)"
            )


class MetricSums:
    """Sums and counts of all metrics over batches of any size."""

    def __init__(self, reduction: Reduction, loss: object, metrics: Mapping[str, Metric]):
        self.reduction, self.loss, self.metrics = reduction, loss, metrics
        self.sums: dict[str, list[float]] = {}
        """By metric, its sum and its count."""
        self.is_of_tokens = False

    def add(self, output: Any, targets: Any, summed_loss: float, size: int) -> None:
        """Adds a batch of `size` samples."""
        self._add("samples", 1.0, size)
        self._add("loss", summed_loss, self.reduction.count(targets))
        labels = _labels(targets)
        if labels is not None:
            self.is_of_tokens |= labels.ndim == 2 and not self.reduction.counts_samples
            scored = self._correct(_logits(output), labels)
            if scored is not None:
                self._add("accuracy", *scored)
        for name, metric in self.metrics.items():
            self._add(name, *_read(name, metric(output, targets), size))

    def _add(self, name: str, total: float, count: float) -> None:
        sums = self.sums.setdefault(name, [0.0, 0.0])
        sums[0] += total
        sums[1] += count

    def _correct(self, logits: Tensor | None, labels: Tensor) -> tuple[float, float] | None:
        """Returns how many labels have the largest logit, and how many labels count; None if there are no classes."""
        if logits is None:
            return None
        labels = labels.to(logits.device)
        dim = _class_dim(logits, labels, is_first=_is_torch_loss(self.loss))
        if dim is None:
            return None
        predicted = logits.argmax(dim)
        if self.reduction.kind == "shifted":
            predicted, labels = predicted[:, :-1], labels[:, 1:]
        counted = labels != self.reduction.ignored
        return float(((predicted == labels) & counted).sum()), float(counted.sum())

    def add_ranks(self, ranks: TrainerRanks) -> None:
        """Adds up the sums of all ranks, of which one has run the last unit of each batch."""
        names = sorted({name for text in ranks.gather_text(json.dumps([*self.sums])) for name in json.loads(text)})
        table = [value for name in names for value in self.sums.get(name, (0.0, 0.0))]
        totals = ranks.add_up([*table, float(self.is_of_tokens)])
        self.is_of_tokens = totals[-1] > 0
        self.sums = {name: totals[2 * n : 2 * n + 2] for n, name in enumerate(names)}

    def result(self) -> dict[str, float]:
        """Returns the mean of each metric, the perplexity of token losses, and the number of samples."""
        means = {name: total / count if count else math.nan for name, (total, count) in self.sums.items()}
        result = {"loss": means.pop("loss")}
        samples = self.sums["samples"][1]
        del means["samples"]
        if self.is_of_tokens:
            result["perplexity"] = math.exp(result["loss"]) if result["loss"] < _LARGEST else math.inf
        return result | means | {"samples": int(samples)}


_LARGEST = 709.0
"""A loss whose exponential is still a float."""


def _read(name: str, value: Any, size: int) -> tuple[float, float]:
    """Returns the sum and the count of what a user's metric returns."""
    if isinstance(value, tuple | list) and len(value) == 2:
        return float(value[0]), float(value[1])
    try:
        return float(value) * size, size
    except (TypeError, ValueError, RuntimeError):
        form = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise InputError(
            f"the metric '{name}' returns {form}; return a mean over the samples of the batch, or (sum, count)"
        ) from None


def _labels(targets: Any) -> Tensor | None:
    """Returns the class labels, if the targets are one tensor of integers."""
    leaves = [leaf for leaf in pytree.tree_leaves(targets) if isinstance(leaf, Tensor)]
    if len(leaves) != 1 or leaves[0].is_floating_point() or leaves[0].is_complex() or leaves[0].dtype == torch.bool:
        return None
    return leaves[0]


def _logits(output: Any) -> Tensor | None:
    if isinstance(output, Mapping):
        output = output.get("logits")
    output = getattr(output, "logits", output)
    return output if isinstance(output, Tensor) and output.is_floating_point() else None


def _class_dim(logits: Tensor, labels: Tensor, *, is_first: bool) -> int | None:
    """Returns the dimension of the classes: the second for losses of torch, the last for others, as both occur."""
    if logits.ndim != labels.ndim + 1:
        return None
    second, last = logits.shape[:1] + logits.shape[2:] == labels.shape, logits.shape[:-1] == labels.shape
    if logits.ndim == 2 or not (second and last):
        dim = 1 if second else -1 if last else None
    else:
        dim = 1 if is_first else -1
    return dim if dim is not None and logits.shape[dim] > 1 else None


def _is_torch_loss(loss: object) -> bool:
    loss = getattr(loss, "func", loss)
    return isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or loss in (
        nn.functional.cross_entropy,
        nn.functional.nll_loss,
    )
