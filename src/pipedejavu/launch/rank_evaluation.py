"""When a rank evaluates, and what it evaluates: held-out samples, between two rounds, on all ranks together."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pipedejavu.engine.evaluation import EvaluationRunner
from pipedejavu.engine.handlers import Handlers
from pipedejavu.program import Program
from pipedejavu.run.options import TrainOptions
from pipedejavu.source.held_out_evaluation import NUM_FIGURES, Evaluation, EvaluationResult
from pipedejavu.source.task import SampleOrder


class EvaluatedStep(NamedTuple):
    """An evaluation of the weights after some update."""

    step: int
    epoch: float
    """Passes over the training data so far."""
    result: EvaluationResult


class RankEvaluation:
    """The evaluations of a run on one rank; made before its worker places the model's tensors on a device."""

    def __init__(self, options: TrainOptions, program: Program, order: SampleOrder):
        self.options, self.program, self.order = options, program, order
        self.evaluation = Evaluation(order.task, order.cut, max(program.sizes))
        self._runner: EvaluationRunner | None = None

    def is_due(self, update: int) -> bool:
        """Whether to evaluate after an update that ends a round."""
        if update >= self.options.steps:
            return True
        before, every = update - self.program.plan.steps, self.options.eval_every
        if every is not None:
            return update // every > before // every
        size = len(self.order.task.data)
        return self.order.samples(update) // size > self.order.samples(before) // size

    def run(self, update: int, handlers: Handlers, add_up: Callable[[Tensor], None]) -> EvaluatedStep:
        """Evaluates the newest weights; all ranks call it together."""
        if self._runner is None:
            self._runner = EvaluationRunner(handlers, self.evaluation.cut.units)
        sums = self._runner.run(self.evaluation, self.evaluation.measure, NUM_FIGURES)
        assert sums.device == torch.device("cpu")
        add_up(sums)
        epoch = self.order.samples(update) / len(self.order.task.data)
        return EvaluatedStep(update, epoch, self.evaluation.result(sums.tolist()))
