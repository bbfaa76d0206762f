"""The loop of `Trainer.fit`: epochs over a loader with evaluations, callbacks and progress."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from pipedejavu.facts import InputError
from pipedejavu.session.callback import Callback, FitTrainer
from pipedejavu.session.eval_metrics import Metric, check_metrics
from pipedejavu.session.fit_history import EpochRecord, FitHistory

_END = object()


class FitLoop:
    """Trains for some epochs, and calls callbacks."""

    def __init__(
        self,
        trainer: FitTrainer,
        loader: Iterable[Any],
        eval_loader: Iterable[Any] | None,
        callbacks: Sequence[Callback],
        metrics: Mapping[str, Metric] | None,
    ):
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise InputError(
                    f"a callback is a {type(callback).__name__}; give instances of subclasses of pipedejavu.Callback"
                )
        for name, given in (("loader", loader), ("eval_loader", eval_loader)):
            if isinstance(given, Iterator):
                raise InputError(
                    f"{name} is a {type(given).__name__}, which can be read only once; give a DataLoader or a list of"
                    " batches"
                )
        check_metrics(metrics or {})
        self.trainer, self.loader, self.eval_loader = trainer, loader, eval_loader
        self.callbacks, self.metrics, self.history = callbacks, metrics, FitHistory()

    def run(self, epochs: int) -> FitHistory:
        """Trains for `epochs` passes over the loader, or until `should_stop` is set."""
        trainer = self.trainer
        trainer.should_stop = False
        self._call("on_train_begin")
        with _progress(trainer.shows_progress) as bar:
            for epoch in range(epochs):
                if trainer.should_stop:
                    break
                self._call("on_epoch_begin", epoch)
                record = self._run_epoch(epoch, epochs, bar)
                self.history.epochs.append(record)
                self._call("on_epoch_end", record)
        self._call("on_train_end", self.history)
        return self.history

    def _run_epoch(self, epoch: int, epochs: int, bar: Progress | None) -> EpochRecord:
        trainer, start_s = self.trainer, time.perf_counter()
        set_epoch(self.loader, epoch)
        total, count, steps = 0.0, 0, 0
        task = _begin(bar, f"epoch {epoch + 1} of {epochs}", self.loader)
        batches = iter(self.loader)
        while not trainer.should_stop:
            batch = next(batches, _END)
            if trainer.has_ended(batch is _END):
                break
            loss = trainer.step(batch)
            self.history.losses.append(loss)
            counted = trainer.last_count
            total, count, steps = total + loss * counted, count + counted, steps + 1
            if bar is not None:
                bar.update(task, advance=1, loss=f"loss {loss:.4g}")
            self._call("on_step_end", loss)
        if not steps:
            raise InputError(f"the loader of epoch {epoch} has no batch; give a DataLoader or a list of batches")
        metrics: dict[str, float] = {}
        if self.eval_loader is not None:
            metrics = trainer.evaluate(self.eval_loader, self.metrics)
            self._call("on_evaluate", metrics)
        if bar is not None:
            shown = {"loss": total / count} | {f"eval {name}": v for name, v in metrics.items() if name != "samples"}
            bar.update(task, loss=", ".join(f"{name} {value:.4g}" for name, value in shown.items()))
        return EpochRecord(epoch, steps, total / count, metrics, time.perf_counter() - start_s)

    def _call(self, name: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, name)(self.trainer, *arguments)


def set_epoch(loader: Any, epoch: int) -> None:
    """Tells the samplers of a loader the epoch, as a DistributedSampler needs to shuffle anew."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    called: list[int] = []
    for owner in owners:
        if callable(getattr(owner, "set_epoch", None)) and id(owner) not in called:
            called.append(id(owner))
            owner.set_epoch(epoch)  # type: ignore[union-attr]


def _progress(is_shown: bool) -> Any:
    """Returns a progress display on a terminal, else nothing."""
    if not is_shown or not sys.stdout.isatty():
        return nullcontext()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("{task.fields[loss]}"), console=Console())


def _begin(bar: Progress | None, description: str, loader: Any) -> TaskID:
    if bar is None:
        return TaskID(0)
    try:
        total = len(loader)
    except TypeError:  # an iterable data set has no length
        total = None
    return bar.add_task(description, total=total, loss="")
