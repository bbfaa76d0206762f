"""External experiment loggers (TensorBoard, Weights & Biases, MLflow), which receive the figures of every update.

The run's own metrics do not depend on them: a logbook that fails during a run is dropped, and training continues.
"""

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from pipedejavu.facts import InputError, read_file, write_file
from pipedejavu.run.options import Logger, TrainOptions
from pipedejavu.run.run_folder import RunFolder

Figures = Mapping[str, float]
PROJECT = "pipedejavu"


class Logbook(Protocol):
    """A destination for the figures of a run."""

    def add(self, step: int, figures: Figures) -> None:
        """Writes the figures of a step."""
        ...

    def close(self) -> None:
        """Writes pending figures and closes the logbook."""
        ...


def check_logbooks(names: Sequence[Logger]) -> None:
    """Raises InputError if the package of a logbook is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise InputError(f"--log {name} needs {name}, which is not installed: pip install 'pipedejavu[{name}]'")


class Logbooks:
    """All logbooks of a run; one that fails is dropped and reported through `say`."""

    def __init__(self, books: Mapping[str, Logbook], say: Callable[[str], None]):
        self.books, self.say = dict(books), say

    def add(self, step: int, figures: Figures) -> None:
        """Writes the figures of a step to all logbooks, without values that are not finite, which some reject."""
        figures = {name: value for name, value in figures.items() if math.isfinite(value)}
        for name, book in list(self.books.items()):
            try:
                book.add(step, figures)
            except Exception as error:
                del self.books[name]
                self.say(f"no more to {name} from step {step} on: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Closes all logbooks."""
        for name, book in self.books.items():
            try:
                book.close()
            except Exception as error:
                self.say(f"{name} may lack the last steps: {type(error).__name__}: {error}")


@contextmanager
def open_logbooks(
    folder: RunFolder, options: TrainOptions, about: Mapping[str, str], start: int, say: Callable[[str], None]
) -> Iterator[Logbooks]:
    """Opens the logbooks named in the options; a run that resumes after step `start` continues its entries.

    Raises InputError if one cannot be opened; a resumed run continues without it.
    """
    settings = {**options.model_dump(exclude={"log"}), **about}
    logbooks = Logbooks({}, say)
    try:
        for name in dict.fromkeys(options.log):
            try:
                logbooks.books[name] = _OPEN[name](folder, settings, start)
            except Exception as error:
                reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
                if not start:
                    raise InputError(f"--log {name} cannot be opened; set it up or leave it out ({reason})") from None
                say(f"nothing goes to {name}, which cannot be opened ({reason})")
        yield logbooks
    finally:
        logbooks.close()


class _TensorBoard:
    def __init__(self, folder: RunFolder, settings: Mapping[str, Any], start: int):
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        self.writer = writer(str(folder.path / "tensorboard"), purge_step=start + 1 if start else None)
        self.writer.add_text("settings", "\n".join(f"- {name}: {value}" for name, value in settings.items()), start)

    def add(self, step: int, figures: Figures) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class _Wandb:
    def __init__(self, folder: RunFolder, settings: Mapping[str, Any], start: int):
        path = folder.path / "wandb.id"
        if not start or not path.exists():
            write_file(path, secrets.token_hex(8))
        self.run = import_module("wandb").init(
            project=PROJECT, name=folder.path.name, id=_read_id(path), resume="allow",
            dir=str(folder.path), config=dict(settings),
        )  # fmt: skip

    def add(self, step: int, figures: Figures) -> None:
        self.run.log(dict(figures), step=step)

    def close(self) -> None:
        self.run.finish()


class _Mlflow:
    def __init__(self, folder: RunFolder, settings: Mapping[str, Any], start: int):
        self.mlflow = import_module("mlflow")
        self.mlflow.set_experiment(PROJECT)
        path = folder.path / "mlflow.id"
        known = _read_id(path) if start and path.exists() else None
        run = self.mlflow.start_run(run_id=known, run_name=None if known else folder.path.name)
        if known is None:
            write_file(path, run.info.run_id)
            self.mlflow.log_params(dict(settings))

    def add(self, step: int, figures: Figures) -> None:
        self.mlflow.log_metrics(dict(figures), step=step)

    def close(self) -> None:
        self.mlflow.end_run()


_OPEN: dict[Logger, Callable[[RunFolder, Mapping[str, Any], int], Logbook]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _Mlflow,
}


def _read_id(path: Path) -> str:
    return read_file(path).decode("utf-8", "replace").strip()
