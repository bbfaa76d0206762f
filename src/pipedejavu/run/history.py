"""The history of a run, read from its folder during or after the run: state, losses, rates, memory, events."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pipedejavu.facts import InputError, Timeline, format_bytes, format_seconds
from pipedejavu.plan import Plan
from pipedejavu.run.job_record import JobRecord
from pipedejavu.run.options import TrainOptions
from pipedejavu.run.run_folder import RunFolder
from pipedejavu.run.run_lock import is_locked

State = Literal["running", "finished", "stopped", "failed"]
_MOST_SHOWN = 1000
"""Characters shown of an event's text."""
_ABOUT_STEP = {"step", "loss", "count", "samples", "elapsed_s", "peak_bytes", "peak_gpu_bytes", "peak_reserved_bytes"}


class RunStep(NamedTuple):
    """A finished update."""

    step: int
    loss: float | None
    """None if the loss was not finite."""
    samples: int | None
    """Samples in the update; None in runs of older versions."""
    elapsed_s: float
    """Training time since the start of the run."""


class RunEvaluation(NamedTuple):
    """The figures of the weights after an update, on samples that are not trained on."""

    step: int
    epoch: float
    loss: float | None
    """None if it was not finite."""
    perplexity: float | None
    accuracy: float | None
    elapsed_s: float
    took_s: float

    def figures(self) -> dict[str, float]:
        """Returns the figures that are known."""
        named = {"eval_loss": self.loss, "perplexity": self.perplexity, "accuracy": self.accuracy}
        return {name: value for name, value in named.items() if value is not None}


class RunEvent(NamedTuple):
    """Anything but a finished step: a checkpoint, new replica shares, a skipped update, a failure, the end."""

    step: int
    """The last step before the event."""
    kind: str
    text: str


@dataclass(frozen=True)
class History:
    """A run, as recorded in its folder."""

    folder: RunFolder
    options: TrainOptions
    plan: Plan
    rows: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, path: "str | Path | RunFolder") -> "History":
        """Reads a run; raises InputError if the folder holds none."""
        folder = path if isinstance(path, RunFolder) else RunFolder(path)
        if not folder.holds_run:
            raise InputError(f"{path} holds no run; give a folder that 'train --run-dir' wrote, or one of such folders")
        return cls(folder, folder.options(), Plan.load(folder.path / "plan.json"), tuple(folder.rows()))

    @cached_property
    def steps(self) -> list[RunStep]:
        """The finished updates, in order."""
        return [
            RunStep(row["step"], _loss(row["loss"]), row.get("samples"), row.get("elapsed_s", 0.0))
            for row in self.rows
            if "loss" in row
        ]

    @cached_property
    def evaluations(self) -> list[RunEvaluation]:
        """The evaluations, in order."""
        return [
            RunEvaluation(
                row["evaluated"], row.get("epoch") or 0.0, _loss(row.get("eval_loss")), _loss(row.get("perplexity")),
                _loss(row.get("accuracy")), row.get("elapsed_s", 0.0), row.get("took_s", 0.0),
            )
            for row in self.rows
            if "evaluated" in row
        ]  # fmt: skip

    @property
    def tokens_per_sample(self) -> float | None:
        """Tokens that count per sample, the mean over all updates; None if samples are counted."""
        rows = [row for row in self.rows if "loss" in row and row.get("samples") and row.get("count")]
        samples, count = sum(row["samples"] for row in rows), sum(row["count"] for row in rows)
        return count / samples if samples and count != samples else None

    def paused_s(self, after: int, until: int) -> float:
        """Returns how long evaluations took after a step and before another one."""
        return sum(done.took_s for done in self.evaluations if after <= done.step < until)

    @property
    def timed(self) -> list[RunStep]:
        """The updates that this run made; steps taken over from an initialisation trial have no time."""
        return [step for step in self.steps if step.elapsed_s > 0]

    @cached_property
    def events(self) -> list[RunEvent]:
        """All events, in order."""
        events, step = [], 0
        for row in self.rows:
            step = row.get("step", step)
            if "evaluated" in row:
                continue
            event = row if "loss" not in row else {key: value for key, value in row.items() if key not in _ABOUT_STEP}
            events += [RunEvent(step, *map(_shorten, _describe(event)))] if event else []
        return events

    @property
    def num_skipped(self) -> int:
        """Number of skipped updates."""
        return sum("skipped" in row for row in self.rows)

    @property
    def state(self) -> State:
        """Whether the run is still going, or how it ended."""
        if is_locked(self.folder.path):
            return "running"
        if self.folder.model.exists():
            return "finished"
        return "stopped" if self.rows and "stopped" in self.rows[-1] else "failed"

    @property
    def reason(self) -> str:
        """Why the run failed; empty if it did not fail."""
        if self.state != "failed":
            return ""
        return (
            _shorten(self.rows[-1]["failed"]) if self.rows and "failed" in self.rows[-1] else "it ended without a word"
        )

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second after the first step, which is warm-up."""
        rates = [*self.rates()]
        samples, time_s = sum(rate[1] for rate in rates), sum(rate[2] for rate in rates)
        return samples / time_s if time_s > 0 else None

    def rates(self) -> Iterator[tuple[int, int, float]]:
        """Yields (last step, samples, seconds) for each group of steps that were reported together."""
        samples, last = 0, self.timed[0] if self.timed else None
        for step in self.timed[1:]:
            assert last is not None
            samples += step.samples or 0
            time_s = step.elapsed_s - last.elapsed_s - self.paused_s(last.step, step.step)
            if time_s > 0 and step.samples:
                yield step.step, samples, time_s
                samples, last = 0, step

    @property
    def step_s(self) -> float | None:
        """Mean seconds per update after the first; None with fewer than two."""
        return self.step_s_after(0)

    def step_s_after(self, done: int) -> float | None:
        """Returns the mean seconds per update after update `done` and the one that follows, which is warm-up."""
        timed = [step for step in self.timed if step.step > done]
        if len(timed) < 2:
            return None
        first, last = timed[0], timed[-1]
        time_s = last.elapsed_s - first.elapsed_s - self.paused_s(first.step, last.step)
        return time_s / (len(timed) - 1)

    @property
    def job(self) -> JobRecord | None:
        """The forecast of the whole run, or of its last part; None if its file is missing or not readable."""
        with suppress(InputError):
            return JobRecord.load(self.folder.forecast) if self.folder.forecast.exists() else None
        return None

    @property
    def predicted(self) -> Timeline | None:
        """The forecast timeline of one round of the program."""
        return self.folder.timeline("predicted") if self.folder.predicted.exists() else None

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory of any worker process."""
        return max((row["peak_bytes"] for row in self.rows if "peak_bytes" in row), default=None)

    @property
    def peak_gpu_bytes(self) -> int | None:
        """Peak GPU memory of any worker."""
        return max((row["peak_gpu_bytes"] for row in self.rows if "peak_gpu_bytes" in row), default=None)

    @property
    def changed_s(self) -> float:
        """When the metrics were last written, in seconds since 1970."""
        path = self.folder.metrics
        return (path if path.exists() else self.folder.path).stat().st_mtime


def find_runs(path: str | Path, tell: Callable[[str], None]) -> list[History]:
    """Returns the runs in the subfolders of a folder, newest first; reports unreadable ones to `tell`."""
    if not Path(path).is_dir():
        raise InputError(f"there is no folder {path}; 'train' writes runs to runs/ unless --run-dir says otherwise")
    runs = []
    try:
        folders = [*Path(path).iterdir()]
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    for inside in folders:
        try:
            if RunFolder(inside).holds_run:
                runs.append(History.read(inside))
        except InputError as error:
            tell(f"{inside.name} is left out: {error}")
    return sorted(runs, key=lambda run: -run.changed_s)


def _shorten(value: object) -> str:
    """Returns a value as text, truncated to what is shown."""
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _loss(value: float | None) -> float | None:
    """Returns a loss, or None if it is not finite: JSON has no number for it."""
    return float(value) if value is not None and math.isfinite(value) else None


def _describe(row: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the kind of event in a row of the metrics, and a sentence about it."""
    match row:
        case {"saved": step, "size_bytes": size, "took_s": took}:
            return "saved", f"step {step}, {format_bytes(size)} in {format_seconds(took)}"
        case {"not_saved": step, "reason": reason}:
            return "not saved", f"step {step}: {reason}"
        case {"skipped": step, "reason": reason}:
            return "skipped", f"the update of step {step} was left out: {reason}"
        case {"left": step, "worker": worker, "signal": name, "at": at}:
            return "left", f"worker {worker} was ended by {name} at {at} after step {step}; the others went on"
        case {"start": {**phases}}:
            return "start", ", ".join(f"{name} {format_seconds(float(str(time_s)))}" for name, time_s in phases.items())
        case {"resumed": step}:
            return "resumed", f"after step {step}"
        case {"shares": [*shares]}:
            return "shares", " + ".join(f"{share:.1%}" for share in shares)
        case {"stopped": step}:
            return "stopped", f"saved up to step {step}" if step else "nothing was saved"
        case {"failed": reason}:
            return "failed", str(reason)
    kind, *_ = row
    return kind.replace("_", " "), "; ".join(_word(key, value) for key, value in row.items())


def _word(key: str, value: Any) -> str:
    return key.replace("_", " ") if value is True else f"{key.replace('_', ' ')} {value}"
