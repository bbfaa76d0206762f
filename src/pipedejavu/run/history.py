"""What a run folder tells of its run, while it goes on and afterwards: state, losses, rates, memory, events."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pipedejavu.facts import InputError, Timeline, format_bytes, format_seconds
from pipedejavu.plan import Plan
from pipedejavu.run.options import TrainOptions
from pipedejavu.run.run_folder import RunFolder
from pipedejavu.run.run_lock import is_locked

State = Literal["running", "finished", "stopped", "failed"]
_MOST_SHOWN = 1000
"""Characters of what happened."""
_ABOUT_STEP = {"step", "loss", "count", "samples", "elapsed_s", "peak_bytes", "peak_gpu_bytes"}


class RunStep(NamedTuple):
    """A finished update."""

    step: int
    loss: float | None
    """None if it was not finite."""
    samples: int | None
    """In it; older runs did not say."""
    elapsed_s: float
    """Of training, from the run's beginning."""


class RunEvent(NamedTuple):
    """Something other than a step: a checkpoint, a share that moved, an update left out, a fault, an end."""

    step: int
    """The last one before it."""
    kind: str
    text: str


@dataclass(frozen=True)
class History:
    """A run as its folder tells it."""

    folder: RunFolder
    options: TrainOptions
    plan: Plan
    rows: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, path: "str | Path | RunFolder") -> "History":
        """Reads a run; raises InputError where the folder holds none."""
        folder = path if isinstance(path, RunFolder) else RunFolder(path)
        if not folder.holds_run:
            raise InputError(f"{path} holds no run; give a folder that 'train --run-dir' wrote, or one of such folders")
        return cls(folder, folder.options(), Plan.load(folder.path / "plan.json"), tuple(folder.rows()))

    @cached_property
    def steps(self) -> list[RunStep]:
        """The finished updates, in their order."""
        return [
            RunStep(row["step"], _loss(row["loss"]), row.get("samples"), row.get("elapsed_s", 0.0))
            for row in self.rows
            if "loss" in row
        ]

    @property
    def timed(self) -> list[RunStep]:
        """The updates that the run has made itself; those of a candidate that it began with have no time."""
        return [step for step in self.steps if step.elapsed_s > 0]

    @cached_property
    def events(self) -> list[RunEvent]:
        """All that happened beside steps, in its order."""
        found, step = [], 0
        for row in self.rows:
            step = row.get("step", step)
            told = row if "loss" not in row else {key: value for key, value in row.items() if key not in _ABOUT_STEP}
            found += [RunEvent(step, *map(_cut, _describe(told)))] if told else []
        return found

    @property
    def num_skipped(self) -> int:
        """Updates that were left out."""
        return sum("skipped" in row for row in self.rows)

    @property
    def state(self) -> State:
        """Whether it goes on, or how it ended."""
        if is_locked(self.folder.path):
            return "running"
        if self.folder.model.exists():
            return "finished"
        return "stopped" if self.rows and "stopped" in self.rows[-1] else "failed"

    @property
    def reason(self) -> str:
        """Why it failed; empty for a run that did not."""
        if self.state != "failed":
            return ""
        return _cut(self.rows[-1]["failed"]) if self.rows and "failed" in self.rows[-1] else "it ended without a word"

    @property
    def samples_per_s(self) -> float | None:
        """The rate behind the first step, which warms up."""
        rates = [*self.rates()]
        samples, time_s = sum(rate[1] for rate in rates), sum(rate[2] for rate in rates)
        return samples / time_s if time_s > 0 else None

    def rates(self) -> Iterator[tuple[int, int, float]]:
        """Yields for groups of steps that were told together the last of them, their samples and their time."""
        samples, last = 0, self.timed[0] if self.timed else None
        for step in self.timed[1:]:
            assert last is not None
            samples += step.samples or 0
            if step.elapsed_s > last.elapsed_s and step.samples:
                yield step.step, samples, step.elapsed_s - last.elapsed_s
                samples, last = 0, step

    @property
    def step_s(self) -> float | None:
        """What an update took behind the first."""
        if len(self.timed) < 2:
            return None
        first, last = self.timed[0], self.timed[-1]
        return (last.elapsed_s - first.elapsed_s) / (len(self.timed) - 1)

    @property
    def predicted(self) -> Timeline | None:
        """The forecast of one round of the program."""
        return self.folder.timeline("predicted") if self.folder.predicted.exists() else None

    @property
    def peak_bytes(self) -> int | None:
        """Most memory that a worker's process has had."""
        return max((row["peak_bytes"] for row in self.rows if "peak_bytes" in row), default=None)

    @property
    def peak_gpu_bytes(self) -> int | None:
        """Most memory that a worker has had on its GPU."""
        return max((row["peak_gpu_bytes"] for row in self.rows if "peak_gpu_bytes" in row), default=None)

    @property
    def changed_s(self) -> float:
        """When something was last written, in seconds since 1970."""
        path = self.folder.metrics
        return (path if path.exists() else self.folder.path).stat().st_mtime


def find_runs(path: str | Path, tell: Callable[[str], None]) -> list[History]:
    """Returns the runs in the folders of a folder, those that changed last first; tells which cannot be read."""
    if not Path(path).is_dir():
        raise InputError(f"there is no folder {path}; 'train' writes runs to runs/ unless --run-dir says otherwise")
    found = []
    try:
        folders = [*Path(path).iterdir()]
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    for inside in folders:
        try:
            if RunFolder(inside).holds_run:
                found.append(History.read(inside))
        except InputError as error:
            tell(f"{inside.name} is left out: {error}")
    return sorted(found, key=lambda run: -run.changed_s)


def _cut(value: object) -> str:
    """Returns what a row says, as far as it is shown."""
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _loss(value: float | None) -> float | None:
    """Returns a loss; None for one that is not finite, for which JSON has no number."""
    return float(value) if value is not None and math.isfinite(value) else None


def _describe(row: Mapping[str, Any]) -> tuple[str, str]:
    """Returns what a row of the metrics says, as a kind and a sentence."""
    match row:
        case {"saved": step, "size_bytes": size, "took_s": took}:
            return "saved", f"step {step}, {format_bytes(size)} in {format_seconds(took)}"
        case {"not_saved": step, "reason": reason}:
            return "not saved", f"step {step}: {reason}"
        case {"skipped": step, "reason": reason}:
            return "skipped", f"the update of step {step} was left out: {reason}"
        case {"resumed": step}:
            return "resumed", f"behind step {step}"
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
