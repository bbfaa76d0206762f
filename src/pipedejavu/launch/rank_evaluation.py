"""When a rank evaluates, and what it evaluates: held-out samples, between two rounds, on all ranks together."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pipedejavu.engine.handlers import Handlers
from pipedejavu.engine.unit_random import mixed
from pipedejavu.engine.wire import PeerLeftError
from pipedejavu.program import Program
from pipedejavu.run.options import TrainOptions
from pipedejavu.runtime.evaluation_mode import evaluation_mode
from pipedejavu.session.evaluation import RankPlaces, run_model
from pipedejavu.session.newest_weights import NewestWeights, final_replicas
from pipedejavu.source.held_out_evaluation import NUM_FIGURES, Evaluation, EvaluationResult
from pipedejavu.source.rng import preserve_rng, seed_all
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
        """Evaluates the newest weights; all ranks call it together, and begin again if a rank dies on the way."""
        while True:
            sums = torch.zeros(NUM_FIGURES, dtype=torch.float64)
            with suppress(PeerLeftError):  # `add_up` raises it on all ranks
                self._measure(handlers, sums)
            with suppress(PeerLeftError):
                add_up(sums)
                break
        epoch = self.order.samples(update) / len(self.order.task.data)
        return EvaluatedStep(update, epoch, self.evaluation.result(sums.tolist()))

    def _measure(self, handlers: Handlers, sums: Tensor) -> None:
        """Adds this rank's microbatches to the sums; replicas with the same weights share the microbatches."""
        evaluation, places = self.evaluation, RankPlaces(handlers)
        program, units = self.program, handlers.job.units
        replicas = [NewestWeights(program, units, [handlers], n) for n in final_replicas(program, units)]
        modules = [module for _, module in evaluation.cut.units]
        with torch.no_grad(), preserve_rng(handlers.device), evaluation_mode(evaluation.task.model, *modules):
            for number in range(len(evaluation)):
                seed_all(mixed(handlers.job.seed, number))  # a model may draw in evaluation mode too
                weights, form = replicas[number % len(replicas)], evaluation.size(number)
                read = partial(evaluation.inputs, number)
                output, worker = run_model(evaluation.cut, read, form, weights, places)
                if places.is_here(worker):
                    sums += evaluation.measure(number, output).cpu()
        places.finish()
