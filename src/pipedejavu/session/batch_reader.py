"""Reads the batches of a Trainer's loop: brings them into the engine's form, and joins those of all ranks."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from pipedejavu.session.trainer_plan import read_sample
from pipedejavu.session.trainer_ranks import BatchKind, TrainerRanks
from pipedejavu.source.loss_reduction import Reduction
from pipedejavu.source.user_batch import UserBatch


class BatchReader:
    """Reads batches for one model and loss; the first one decides their form."""

    def __init__(
        self, model: nn.Module, loss: Callable[[Any, Any], Tensor] | None, ranks: TrainerRanks | None, kind: BatchKind
    ):
        self.model, self.loss, self.ranks, self.kind = model, loss, ranks, kind
        self._first: tuple[UserBatch, Reduction] | None = None

    def read(self, batch: Any) -> tuple[UserBatch, Reduction]:
        """Returns the first batch in the form of the engine, and how the loss is reduced over samples."""
        self._first = self._first or read_sample(self.model, self.loss, batch)
        return self._first

    def form(self, batch: Any) -> UserBatch:
        """Returns a batch in the form of the first."""
        return UserBatch.of(batch, self.read(batch)[0].per_sample, has_own_loss=self.loss is None)

    def whole(self, batch: Any, call: str) -> Any:
        """Returns the batch of all ranks; `call` names what they all call."""
        if self.ranks is None:
            return batch
        per_sample = self._first[0].per_sample if self._first else None
        form = UserBatch.of(batch, per_sample, has_own_loss=self.loss is None)
        joined, self.kind = self.ranks.share_batch(batch, self.kind, form, call)
        return joined
