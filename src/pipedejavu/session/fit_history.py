"""What `Trainer.fit` has done: losses, metrics and times."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class EpochRecord:
    """One epoch of `Trainer.fit`."""

    epoch: int
    """Its number; the first is 0."""
    steps: int
    """Steps made in it."""
    loss: float
    """The mean loss over its samples, or over its labels that count."""
    metrics: dict[str, float]
    """What `evaluate` returned after it; empty without an `eval_loader`."""
    seconds: float
    """The time of its steps and its evaluation."""


@dataclass
class FitHistory:
    """What `Trainer.fit` has done."""

    losses: list[float] = field(default_factory=list)
    """The mean loss of each step."""
    epochs: list[EpochRecord] = field(default_factory=list)
    """A record per epoch."""

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The metrics of each epoch."""
        return [record.metrics for record in self.epochs]

    @property
    def seconds(self) -> float:
        """The time of all epochs."""
        return sum(record.seconds for record in self.epochs)
