"""`Trainer.evaluate`: a pass over a loader, in one process or on several ranks."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipedejavu.engine.device import CPU
from pipedejavu.facts import InputError
from pipedejavu.profile import ModelCut, cut_model
from pipedejavu.profile.unit_step import moved
from pipedejavu.runtime.evaluation_mode import evaluation_mode
from pipedejavu.session.eval_metrics import Metric, MetricSums, check_metrics
from pipedejavu.session.evaluation import RankPlaces, WorkerPlaces, device_of_model, run_model
from pipedejavu.session.newest_weights import NewestWeights
from pipedejavu.session.trainer_ranks import BatchKind, TrainerRanks
from pipedejavu.source.loss_reduction import Loss, Reduction, own_loss
from pipedejavu.source.precision import check_autocast
from pipedejavu.source.rng import preserve_rng
from pipedejavu.source.user_batch import UserBatch

Reading = Callable[[Any], tuple[UserBatch, Reduction]]
"""Returns the form of the first batch that a Trainer is given, and how its loss is reduced."""


class LoopEvaluation:
    """Evaluates one model for a Trainer; keeps what was recorded of the model from call to call."""

    def __init__(self, model: nn.Module, loss: Loss | None, ranks: TrainerRanks | None):
        self.model, self.loss, self.ranks = model, loss, ranks
        self._cuts: dict[str, ModelCut] = {}
        """The model's units in evaluation mode, by the shapes of its inputs."""

    def run(
        self,
        loader: Iterable[Any],
        metrics: Mapping[str, Metric],
        read: Reading,
        weights: NewestWeights | None,
        kind: BatchKind,
    ) -> dict[str, float]:
        """Returns the metrics of all batches; without weights, those of the model itself."""
        check_autocast("Trainer.evaluate()")
        check_metrics(metrics)
        devices = weights.devices if weights is not None else {0: device_of_model(self.model)}
        gpus = sorted({device for device in devices.values() if device.type == "cuda"}, key=str)
        places = self._places(weights, devices)
        sums: MetricSums | None = None
        with preserve_rng(gpus[0] if gpus else CPU):
            for given in loader:
                batch, kind = self._whole(given, kind)
                known, reduction = read(batch)
                form = UserBatch.of(batch, known.per_sample, has_own_loss=self.loss is None)
                sums = sums or MetricSums(reduction, self.loss, metrics)
                self._add(form, reduction, weights, places, sums)
            places.finish()
            if self.ranks is not None:
                self.ranks.agree("the end of evaluate")
        for gpu in gpus:
            torch.cuda.synchronize(gpu)  # the next round may overwrite what is read here
        if sums is None:
            raise InputError("the loader of evaluate() has no batch; give a DataLoader or a list of batches")
        if self.ranks is not None and weights is not None:
            sums.add_ranks(self.ranks)
        return sums.result()

    def _places(self, weights: NewestWeights | None, devices: Mapping[int, torch.device]) -> WorkerPlaces:
        if self.ranks is None or weights is None:
            return WorkerPlaces(devices)
        return RankPlaces(weights.handlers[0])

    def _add(
        self,
        batch: UserBatch,
        reduction: Reduction,
        weights: NewestWeights | None,
        places: WorkerPlaces,
        sums: MetricSums,
    ) -> None:
        """Adds a batch to the sums, in the process that has its output."""
        loss = self.loss or own_loss
        with torch.no_grad(), evaluation_mode(self.model, loss):
            form = str(pytree.tree_map_only(Tensor, lambda t: (tuple(t.shape), t.dtype), batch.inputs))
            output, worker = run_model(self._cut(batch.inputs, form), lambda: batch.inputs, form, weights, places)
            if places.is_here(worker):
                targets = moved(batch.targets, places.devices[worker])
                sums.add(output, targets, float(reduction.summed(loss)(output, targets)), batch.size)

    def _cut(self, inputs: Any, form: str) -> ModelCut:
        known = self._cuts.get(form)
        if known is None or known.method == "chain":  # a chain may have got other hooks; reading it costs nothing
            known = self._cuts[form] = cut_model(self.model, inputs)
        return known

    def _whole(self, batch: Any, kind: BatchKind) -> tuple[Any, BatchKind]:
        """Returns the batch of all ranks."""
        if self.ranks is None:
            return batch, kind
        form = UserBatch.of(batch, has_own_loss=self.loss is None)
        return self.ranks.share_batch(batch, kind, form, "evaluate")
