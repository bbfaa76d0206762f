"""The run folder: the files that a run reads and writes, and their names."""

import math
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field
from torch import Tensor

from pipedejavu.facts import (
    InputError,
    Machine,
    Profile,
    Record,
    Timeline,
    remove,
    to_json_text,
    write_file,
)
from pipedejavu.facts.file import read_regular
from pipedejavu.plan import Plan
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.run.fallback_folder import Fallback
from pipedejavu.run.final_file import ModelFile, PendingMetrics, TextFile
from pipedejavu.run.metrics_file import MOST_BYTES, append_metrics, read_metrics, step_of
from pipedejavu.run.options import TrainOptions
from pipedejavu.run.settings import Settings
from pipedejavu.run.worker_result import Weights
from pipedejavu.store import Checkpoint, CheckpointDir


def result_of(program: Program, weights: Weights) -> dict[str, Tensor]:
    """Returns the trained weights of the replica that a run ends with.

    A replica whose share of the batch is zero has no weights.
    """
    source = source_replica(program, weights)
    return {name: w for (_, replica), named in weights.items() if replica == source for name, w in named.items()}


def source_replica(program: Program, keys: Iterable[tuple[int, int]]) -> int:
    """Returns the replica whose weights are the result, given the (piece, replica) pairs that workers hold.

    It is the server if the server makes the updates, else the first replica.
    """
    reduce = program.plan.reduce
    is_on_server = reduce.combiner == "elastic" or (reduce.wire == "server" and reduce.gate == "lock")
    return program.num_replicas if is_on_server else min(replica for _, replica in keys)


class RunStart(Record):
    """Where a run starts or resumes: the last finished update and the next sample; a step above 0 has a checkpoint."""

    step: int = Field(default=0, ge=0, lt=2**63)
    samples: int = Field(default=0, ge=0, lt=2**63)
    fingerprints: dict[str, str] = Field(default={})
    """Fingerprints of the model's source and of the data."""

    @classmethod
    def after(cls, checkpoint: Checkpoint | None, fingerprints: dict[str, str] | None = None) -> "RunStart":
        """Returns the start after a checkpoint; step 0 without one."""
        step, samples = (checkpoint.step, checkpoint.manifest.samples) if checkpoint else (0, 0)
        return cls(step=step, samples=samples, fingerprints=fingerprints or {})


class RunFolder:
    """The paths of one run, and the records in them."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.model = self.path / "model.safetensors"
        self.metrics = self.path / "metrics.jsonl"
        self.predicted = self.path / "predicted.json"
        self.measured = self.path / "measured.json"
        self.forecast = self.path / "forecast.json"
        self.report = self.path / "report.html"
        self.parts = self.path / "parts"
        self.switch = self.parts / "switch.json"
        self.checkpoint_dir = CheckpointDir(self.path / "checkpoints")
        self.fallback = Fallback(self.path)
        self._unwritten, self._lock, self._writing = b"", threading.Lock(), threading.Lock()
        self._since_s = math.inf

    @property
    def holds_run(self) -> bool:
        """Whether the folder has a run's options or checkpoints."""
        try:
            return (self.path / "options.json").exists() or self.checkpoint_dir.has_traces
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror}") from None

    def check_new(self) -> None:
        """Raises InputError if the folder holds a run."""
        if self.holds_run:
            raise InputError(
                f"{self.path} holds a run already; go on with --resume, choose another --run-dir or remove it"
            )

    def create(
        self,
        options: TrainOptions,
        program: Program,
        start: "RunStart | None" = None,
        fingerprints: Mapping[str, str] | None = None,
    ) -> None:
        """Creates the folder and writes the files that workers need; refuses an existing run unless `start` resumes it.

        `fingerprints` of model and data are stored in the run's checkpoints.
        """
        if start is None:
            self.check_new()
        begun = start or RunStart()
        later = [step for step in self.checkpoint_dir.steps() if step > begun.step]
        if later:
            raise InputError(
                f"{self.checkpoint_dir.path} has a checkpoint of step {later[-1]}, after step {begun.step}, from which"
                " the run is to go on; move it away"
            )
        if fingerprints and not begun.fingerprints:
            begun = begun.replace(fingerprints=dict(fingerprints))
        try:
            remove(self.parts)
            self.parts.mkdir(parents=True)
            if self.metrics.is_symlink() or not self.metrics.is_file():  # not written by a run
                remove(self.metrics)
        except OSError as error:
            raise InputError(f"cannot make the run folder {self.path}: {error.strerror}") from None
        if start is not None:
            self._forget(start.step)
            for path in (self.model, self.measured, self.report):  # results of the run before it was resumed
                path.unlink(missing_ok=True)
        begun.save(self.parts / "start.json")
        Settings.of(options, program).write(self.path)

    def _forget(self, step: int) -> None:
        """Removes the metrics of steps after `step`, which are trained again."""
        rows = [row for row in self.rows() if step_of(row) <= step]
        if self.metrics.exists():
            write_file(self.metrics, "".join(to_json_text(row) + "\n" for row in rows))
            self.add_metrics({"resumed": step})

    def rows(self) -> list[dict[str, Any]]:
        """Returns the rows of the metrics; lines that are truncated or malformed are ignored."""
        return read_metrics(self.place(self.metrics))

    def elapsed_s(self) -> float:
        """Returns the training time of the run so far."""
        return max((float(row["elapsed_s"]) for row in self.rows() if "elapsed_s" in row), default=0.0)

    def start(self) -> "RunStart":
        """Reads where the run starts or resumes."""
        path = self.parts / "start.json"
        return RunStart.load(path) if path.exists() else RunStart()

    def options(self) -> TrainOptions:
        """Reads the options."""
        return TrainOptions.load(self.path / "options.json")

    def program(self) -> Program:
        """Compiles the program from the folder's plan, profile and machine; the result is the same on every worker."""
        plan = Plan.load(self.path / "plan.json")
        profile, machine = Profile.load(self.path / "profile.json"), Machine.load(self.path / "machine.json")
        return compile_plan(plan, profile, machine, fold=False)

    def timeline(self, origin: str) -> Timeline:
        """Reads the predicted or the measured timeline."""
        path = self.path / f"{origin}.json"
        if not path.exists():
            raise InputError(
                f"{self.path} has no {origin} timeline; the run did not get that far, or it is no run folder"
            )
        return Timeline.load(path)

    def place(self, path: Path) -> Path:
        """Returns the actual path of one of the run's files, which differs if it went to the fallback folder."""
        return self.fallback.moved.get(path, path)

    def write_model(self, trained: dict[str, Tensor]) -> None:
        """Writes a model's state dict atomically; to the fallback folder if the disk refuses it."""
        self.fallback.write(self.model, ModelFile(trained))

    def write_last(self, path: Path, text: str) -> None:
        """Writes one of the run's final files; to the fallback folder if the disk refuses it."""
        self.fallback.write(path, TextFile(text))

    def remove_parts(self) -> None:
        """Removes the files that only the workers needed."""
        remove(self.parts)

    def add_metrics(self, row: dict[str, Any]) -> None:
        """Appends a line to the metrics; a line that the disk refuses is kept and written with the next one.

        If the disk blocks, one thread waits for it and lines from other threads are buffered in memory.
        """
        with self._lock:
            self._unwritten += f"{to_json_text(row)}\n".encode()
        while self._unwritten and self._writing.acquire(blocking=False):
            self._since_s = time.monotonic()
            try:
                data = self._unwritten
                append_metrics(self.metrics, data)
                with self._lock:
                    self._unwritten = self._unwritten[len(data) :]
            except OSError:
                return
            finally:
                self._since_s = math.inf
                self._writing.release()

    def stuck_s(self) -> float:
        """Returns how long a write of metrics has been blocked by the disk; 0 if none is."""
        return max(0.0, time.monotonic() - self._since_s)

    def pending(self) -> dict[str, Any]:
        """Returns the data of this process that the run's disk has not taken, for the process that ends the run."""
        moved = {str(path): str(target) for path, target in self.fallback.moved.items()}
        return {"metrics": self._unwritten.decode(), "moved": moved, "folder": str(self.fallback.path or "")}

    def adopt(self, pending: dict[str, Any]) -> None:
        """Takes over the pending data of another process of the run."""
        self._unwritten += pending["metrics"].encode()
        if pending["folder"]:
            moved = {Path(path): Path(target) for path, target in pending["moved"].items()}
            self.fallback.adopt(Path(pending["folder"]), moved)

    def write_pending(self) -> None:
        """Writes the pending metrics; if the disk still refuses them, writes all metrics to the fallback folder."""
        with self._writing:
            if not self._unwritten:
                return
            before = b""
            with suppress(OSError):
                before = read_regular(self.metrics, MOST_BYTES)
            self.fallback.write(self.metrics, PendingMetrics(self.metrics, before, self._unwritten))
            self._unwritten = b""
