"""The run folder: what a run is given, what it leaves, and under which names."""

import errno
import json
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from pipedejavu.facts import InputError, Machine, Profile, Record, Span, Timeline, remove, write_file
from pipedejavu.facts.file import fresh_path
from pipedejavu.plan import Plan
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.store import Checkpoint, Shelf
from pipedejavu.train.metric import read_metrics, step_of
from pipedejavu.train.options import TrainOptions

Weights = dict[tuple[int, int], dict[str, Tensor]]
"""By (piece, replica) and name."""


def result_of(program: Program, weights: Weights) -> dict[str, Tensor]:
    """Returns what a run has trained: the server's copy where it makes the updates, else the first replica's.

    A replica whose share is nothing has none.
    """
    reduce = program.plan.reduce
    is_on_server = reduce.combiner == "elastic" or (reduce.wire == "server" and reduce.gate == "lock")
    source = program.num_replicas if is_on_server else min(replica for _, replica in weights)
    return {name: w for (_, replica), found in weights.items() if replica == source for name, w in found.items()}


class Start(Record):
    """Where a run goes on: behind which update, and with which sample; a step above 0 has a checkpoint."""

    step: int = Field(default=0, ge=0, lt=2**63)
    samples: int = Field(default=0, ge=0, lt=2**63)

    @classmethod
    def behind(cls, found: Checkpoint | None) -> "Start":
        """Returns the start behind a checkpoint; the beginning where there is none."""
        return cls(step=found.step, samples=found.manifest.samples) if found else cls()


class Part(NamedTuple):
    """What one worker leaves, as bytes that a file or a wire can carry."""

    weights: bytes
    facts: bytes

    @classmethod
    def of(cls, weights: Weights, spans: list[Span], facts: dict[str, Any]) -> "Part":
        """Packs a worker's weights, the spans of its last round, and its counts."""
        flat = {
            f"{piece}/{replica}/{name}": weight.detach().cpu().contiguous().clone()
            for (piece, replica), found in weights.items()
            for name, weight in found.items()
        }
        return cls(save(flat), json.dumps({"spans": spans, **facts}).encode())


class RunFolder:
    """Paths and records of one run."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.model = self.path / "model.safetensors"
        self.metrics = self.path / "metrics.jsonl"
        self.predicted = self.path / "predicted.json"
        self.measured = self.path / "measured.json"
        self.report = self.path / "report.html"
        self.parts = self.path / "parts"
        self.failure = self.parts / "failure"
        self.slate = self.parts / "slate"
        self.switch = self.parts / "switch.json"
        self.shelf = Shelf(self.path / "checkpoints")
        self._unwritten, self._lock = b"", threading.Lock()

    @property
    def holds_run(self) -> bool:
        """Whether a run was begun here."""
        return (self.path / "options.json").exists()

    def create(self, options: TrainOptions, program: Program, start: "Start | None" = None) -> None:
        """Makes the folder and writes what the workers need; refuses one that holds a run, unless that goes on."""
        if start is None and self.holds_run:
            raise InputError(
                f"{self.path} holds a run already; go on with --resume, choose another --run-dir or remove it"
            )
        try:
            remove(self.parts)
            self.parts.mkdir(parents=True)
            if self.metrics.is_symlink() or not self.metrics.is_file():  # nothing that a run has written
                remove(self.metrics)
        except OSError as error:
            raise InputError(f"cannot make the run folder {self.path}: {error.strerror}") from None
        if start is not None:
            self._forget(start.step)
            self.shelf.forget(start.step)
            for path in (self.model, self.measured, self.report):  # of a run that ended sooner
                path.unlink(missing_ok=True)
            start.save(self.parts / "start.json")
        options.save(self.path / "options.json")
        program.plan.save(self.path / "plan.json")
        program.profile.save(self.path / "profile.json")
        program.machine.save(self.path / "machine.json")

    def _forget(self, step: int) -> None:
        """Removes metrics of what is trained again."""
        rows = [row for row in self.rows() if step_of(row) <= step]
        if self.metrics.exists():
            write_file(self.metrics, "".join(json.dumps(row) + "\n" for row in rows))
            self.add_metrics({"resumed": step})

    def rows(self) -> list[dict[str, Any]]:
        """Returns the metrics; a line that a kill has cut off, or that is none of this program's, is left out."""
        return read_metrics(self.metrics)

    def elapsed_s(self) -> float:
        """Returns how long the run has trained."""
        return max((float(row["elapsed_s"]) for row in self.rows() if "elapsed_s" in row), default=0.0)

    def start(self) -> "Start":
        """Reads where the run goes on."""
        path = self.parts / "start.json"
        return Start.load(path) if path.exists() else Start()

    def options(self) -> TrainOptions:
        """Reads the options."""
        return TrainOptions.load(self.path / "options.json")

    def program(self) -> Program:
        """Compiles the program again: the same on every worker, as everything in it is in the folder."""
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

    def write_part(self, rank: int, part: "Part") -> None:
        """Writes one worker's part."""
        (self.parts / f"{rank}.safetensors").write_bytes(part.weights)
        (self.parts / f"{rank}.json").write_bytes(part.facts)

    def read_parts(self, count: int) -> tuple[Weights, list[dict[str, Any]]]:
        """Reads what all workers wrote."""
        weights: Weights = {}
        for rank in range(count):
            for key, weight in load_file(self.parts / f"{rank}.safetensors").items():
                piece, replica, name = key.split("/", 2)
                weights.setdefault((int(piece), int(replica)), {})[name] = weight
        return weights, [json.loads((self.parts / f"{rank}.json").read_text()) for rank in range(count)]

    def write_model(self, trained: dict[str, Tensor]) -> None:
        """Writes a run's weights under the model's own names, whole or not at all."""
        part = fresh_path(self.model)
        try:
            for old in self.path.glob(f"{self.model.name}.*.tmp"):  # of a run that was killed
                remove(old)
            save_file(trained, part)
            part.replace(self.model)
        except (OSError, SafetensorError) as error:
            remove(part)
            raise InputError(f"cannot write {self.model}: {error}; make room, and go on with --resume") from None

    def remove_parts(self) -> None:
        """Removes what only the workers needed."""
        shutil.rmtree(self.parts)

    def add_metrics(self, row: dict[str, Any]) -> None:
        """Adds a line to the metrics; on a disk that refuses it, lines wait for the next one."""
        with self._lock:
            self._unwritten += f"{json.dumps(row)}\n".encode()
            with suppress(OSError):
                _append(self.metrics, self._unwritten)
                self._unwritten = b""


def _append(path: Path, data: bytes) -> None:
    """Adds bytes to a file, all or none of them; neither follows a link nor waits for a FIFO."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        before = os.fstat(file).st_size
        if os.write(file, data) < len(data):
            os.ftruncate(file, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(file)
