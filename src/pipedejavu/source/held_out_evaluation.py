"""What a run evaluates: held-out samples as microbatches, the model's units in eval mode, and the figures."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipedejavu.facts import InputError
from pipedejavu.profile import ModelCut, cut_model
from pipedejavu.profile.unit_step import moved
from pipedejavu.runtime.evaluation_mode import evaluation_mode
from pipedejavu.source.hf_model import logits_cross_entropy
from pipedejavu.zoo import Task
from pipedejavu.zoo.loss import IGNORED, cross_entropy
from pipedejavu.zoo.loss import count as count_tokens

NUM_FIGURES = 3
"""Sums over an evaluation: the loss, its count of samples or tokens, and the samples that are classified correctly."""


class EvaluationResult(NamedTuple):
    """The figures of one evaluation."""

    loss: float
    """The mean over samples or tokens."""
    num_items: int
    """Samples or tokens that count."""
    perplexity: float | None = None
    """exp(loss) of a model of tokens whose loss is cross-entropy."""
    accuracy: float | None = None
    """Share of correct classes, of a model that classifies."""

    def figures(self) -> dict[str, float]:
        """Returns the figures by the names that metrics and loggers use."""
        figures = {"eval_loss": self.loss}
        if self.perplexity is not None:
            figures["perplexity"] = self.perplexity
        if self.accuracy is not None:
            figures["accuracy"] = self.accuracy
        return figures


class Evaluation:
    """The held-out samples of a task, and its units in eval mode; made before the units are placed on devices."""

    def __init__(self, task: Task, cut: ModelCut, size: int):
        """`size` is the number of samples per microbatch; the last microbatch may be shorter."""
        assert task.held_out is not None
        self.task, self.data, self._size = task, task.held_out, size
        if not len(self.data):
            raise InputError("there are no samples to evaluate on; hold more out with --eval")
        self._cached: tuple[int, tuple[Any, Any]] | None = None
        self.cut = cut if cut.method == "chain" else self._cut_again(cut)

    def __len__(self) -> int:
        return -(-len(self.data) // self._size)

    def size(self, number: int) -> int:
        """Returns the number of samples of a microbatch."""
        return min(self._size, len(self.data) - number * self._size)

    def inputs(self, number: int) -> Any:
        """Returns the inputs of the model."""
        return self._batch(number)[0]

    def measure(self, number: int, output: Any) -> Tensor:
        """Returns the sums of a microbatch's loss, count and correct classes, from the model's output."""
        targets = self._batch(number)[1]
        count = self.task.count(targets)
        logits = _logits(output)
        device = logits.device if logits is not None else torch.device("cpu")
        here = moved(targets, device)
        loss = self.task.loss(output, here).detach().double()
        correct = torch.full_like(loss, math.nan)  # not a classification
        if self.is_classified(logits, targets):
            assert logits is not None
            correct = ((logits.argmax(1) == here) & (here != IGNORED)).sum().double()
        return torch.stack([loss, torch.full_like(loss, count), correct])

    def is_classified(self, logits: Tensor | None, targets: Any) -> bool:
        """Whether each sample has one class as its target and one score per class as its output."""
        return (
            logits is not None
            and isinstance(targets, Tensor)
            and logits.ndim == 2
            and targets.shape == logits.shape[:1]
            and not targets.is_floating_point()
            and not targets.is_complex()
        )

    def result(self, sums: Sequence[float]) -> EvaluationResult:
        """Returns the figures from their sums over all workers."""
        loss, count, correct = sums
        mean = loss / count if count else math.nan
        accuracy = None if math.isnan(correct) else correct / count
        is_text = self.task.count is count_tokens and self.task.loss in (cross_entropy, logits_cross_entropy)
        perplexity = (math.exp(mean) if mean < 700 else math.inf) if is_text else None
        return EvaluationResult(mean, round(count), perplexity, accuracy)

    def _batch(self, number: int) -> tuple[Any, Any]:
        """Returns the samples of a microbatch in the order of the data."""
        if self._cached is None or self._cached[0] != number:
            first = number * self._size
            self._cached = number, self.data.batch(range(first, first + self.size(number)))
        return self._cached[1]

    def _cut_again(self, cut: ModelCut) -> ModelCut:
        """Cuts the model in eval mode, at the cuts of training if it has them, for both sizes of microbatches."""
        model, last = self.task.model, len(self) - 1
        with evaluation_mode(model):
            inputs = self._batch(0)[0]
            try:
                again = cut_model(model, inputs, cut.begins)
            except InputError:  # fewer operations without dropout
                again = cut_model(model, inputs)
            if self.size(last) != self.size(0):
                again.fit(self._batch(last)[0])
        return again


def _logits(output: Any) -> Tensor | None:
    value = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    return value if isinstance(value, Tensor) else None
