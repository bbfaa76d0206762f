"""`Trainer.evaluate`: a pass over a loader, in one process or on several ranks."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from pipedejavu.engine.device import CPU
from pipedejavu.facts import InputError
from pipedejavu.session.eval_metrics import Metric, MetricSums, check_metrics
from pipedejavu.session.loader_evaluation import LoaderEvaluation, WorkerPlaces, device_of_model
from pipedejavu.session.newest_weights import NewestWeights
from pipedejavu.session.rank_places import RankPlaces
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
        self._evaluation: LoaderEvaluation | None = None

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
        sums: MetricSums | None = None
        with preserve_rng(gpus[0] if gpus else CPU):
            for given in loader:
                batch, kind = self._whole(given, kind)
                known, reduction = read(batch)
                form = UserBatch.of(batch, known.per_sample, has_own_loss=self.loss is None)
                if self._evaluation is None:
                    self._evaluation = LoaderEvaluation(self.model, self.loss or own_loss, reduction)
                sums = sums or MetricSums(reduction, self.loss, metrics)
                self._evaluation.add(form, weights, self._places(weights, devices), sums)
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
        return RankPlaces(self.ranks.rank, devices[self.ranks.rank])

    def _whole(self, batch: Any, kind: BatchKind) -> tuple[Any, BatchKind]:
        """Returns the batch of all ranks."""
        if self.ranks is None:
            return batch, kind
        form = UserBatch.of(batch, has_own_loss=self.loss is None)
        return self.ranks.share_batch(batch, kind, form, "evaluate")
