"""Callbacks of `Trainer.fit`: what a user's own code may do between steps, evaluations and epochs."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from pipedejavu.session.eval_metrics import Metric
from pipedejavu.session.fit_history import EpochRecord, FitHistory


class FitTrainer(Protocol):
    """What callbacks use of a `Trainer`."""

    should_stop: bool
    """Whether training ends after the current step."""
    samples: int
    """Samples trained on so far."""

    @property
    def updates(self) -> int:
        """Updates made so far."""
        ...

    @property
    def shows_progress(self) -> bool:
        """Whether this process shows progress."""
        ...

    @property
    def last_count(self) -> int:
        """How many samples or labels the last step's loss is the mean of."""
        ...

    def has_ended(self, is_here: bool) -> bool:
        """Whether the loaders of all ranks have ended, given whether this rank's has."""
        ...

    def step(self, batch: Any) -> float:
        """Trains on one batch; returns its mean loss."""
        ...

    def evaluate(self, loader: Iterable[Any], metrics: Mapping[str, Metric] | None = None) -> dict[str, float]:
        """Returns metrics of the newest weights."""
        ...

    def save(self, folder: str | Path) -> None:
        """Saves a checkpoint."""
        ...


class Callback:
    """Functions that `Trainer.fit` calls; all do nothing until a subclass defines them.

    Any of them may set `trainer.should_stop = True`: training then ends after the current step, with `on_epoch_end` and
    `on_train_end` still called. On several ranks each calls its own callbacks, and all must stop at the same step.
    """

    def on_train_begin(self, trainer: FitTrainer) -> None:
        """Called before the first step."""

    def on_epoch_begin(self, trainer: FitTrainer, epoch: int) -> None:
        """Called before an epoch; the first is 0."""

    def on_step_end(self, trainer: FitTrainer, loss: float) -> None:
        """Called after each step with its mean loss."""

    def on_evaluate(self, trainer: FitTrainer, metrics: dict[str, float]) -> None:
        """Called after each evaluation with its metrics."""

    def on_epoch_end(self, trainer: FitTrainer, record: EpochRecord) -> None:
        """Called after an epoch and its evaluation."""

    def on_train_end(self, trainer: FitTrainer, history: FitHistory) -> None:
        """Called after the last epoch."""
