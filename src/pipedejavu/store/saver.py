"""The saver of a rank: writes its part of each checkpoint beside training; the first rank's completes them.

Ranks tell each other by way of a store what they have written, so that nobody waits but the first rank's saver. What
cannot be written costs a checkpoint and not the run: it is told in a sentence, what was there before stays, and
training goes on.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore, Store

from pipedejavu.facts import InputError, format_bytes
from pipedejavu.store.manifest import SCHEMA_VERSION, CheckpointError, Entry, Manifest, Part
from pipedejavu.store.part import Tensors, is_storable, write_part
from pipedejavu.store.shelf import LATEST, Shelf, merged, part_name

_LOOK_S = 0.01
"""How often the first rank's saver looks whether the others have written."""

_PATIENCE_S = 10.0
"""How long a rank that has failed waits for the others to end a checkpoint."""

About = Callable[[], Mapping[str, Any]]
"""Returns the fields of a manifest that are not of its tensors; asked when all of them are on the disk."""


class Saver:
    """One rank's part in the checkpoints of a run, one checkpoint at a time."""

    def __init__(
        self,
        shelf: Shelf,
        *,
        rank: int = 0,
        board: tuple[Store, int] | None = None,
        tell: Callable[[str], None] = print,
        note: Callable[[dict[str, Any]], None] = lambda _: None,
    ):
        """Takes the shelf that all ranks see, and how they tell each other: a store, and how many they are.

        `tell` is given sentences for the user, `note` a row for the metrics of each checkpoint.
        """
        self.shelf, self.rank, self.tell, self.note = shelf, rank, tell, note
        self.board, self.size = board or (HashStore(), 1)
        self._thread: threading.Thread | None = None
        self._draft: Path | None = None
        """Where the newest checkpoint is written."""

    def save(self, step: int, tensors: Tensors, about: About) -> None:
        """Writes tensors, which are the saver's from now on, in a thread of its own; waits for the save before."""
        for name, tensor in tensors.items():
            if not is_storable(tensor):
                raise InputError(f"a checkpoint cannot hold '{name}' of type {tensor.dtype}; keep it in another type")
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(step, tensors, about))
        self._thread.start()

    def wait(self) -> None:
        """Waits until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """Waits some seconds at most for the checkpoint that was begun to be complete: this rank's end stops all."""
        last_s = time.monotonic() + _PATIENCE_S
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)
        while self._draft is not None and self._draft.exists() and time.monotonic() < last_s:
            time.sleep(_LOOK_S)

    def _write(self, step: int, tensors: Tensors, about: About) -> None:
        started_s = time.perf_counter()
        self.board.set(f"{step}/{self.rank}", json.dumps(self._write_part(step, tensors)))
        tensors.clear()
        if self.rank:
            return
        reports = [self._report(step, rank) for rank in range(self.size)]
        failed = [report["failed"] for report in reports if "failed" in report]
        try:
            if failed:
                raise OSError(failed[0])
            manifest = _manifest(step, reports, about())
            self.shelf.commit(step, manifest)
        except OSError as error:
            self.shelf.discard(step)
            self._say_failed(step, _reason(error))
            return
        self.note({"saved": step, "size_bytes": manifest.size_bytes, "took_s": time.perf_counter() - started_s})
        try:
            self.shelf.prune()
        except (CheckpointError, OSError) as error:
            self.tell(f"the checkpoint of step {step} was written, but {_reason(error)}; older ones are kept")

    def _write_part(self, step: int, tensors: Tensors) -> dict[str, Any]:
        try:
            if self.size == 1:  # what a kill has left of this step; several ranks share a draft
                self.shelf.discard(step)
            name = part_name(self.rank)
            self._draft = self.shelf.draft(step)
            part, entries = write_part(self._draft / name, tensors)
        except OSError as error:
            size = sum(tensor.nbytes for tensor in tensors.values())
            return {"failed": f"{_reason(error)} (worker {self.rank} had {format_bytes(size)} to write)"}
        return {"part": part.model_dump(), "entries": {n: entry.model_dump() for n, entry in entries.items()}}

    def _report(self, step: int, rank: int) -> dict[str, Any]:
        while not self.board.check([key := f"{step}/{rank}"]):
            time.sleep(_LOOK_S)
        found: dict[str, Any] = json.loads(self.board.get(key))
        self.board.delete_key(key)
        return found

    def _say_failed(self, step: int, reason: str) -> None:
        steps = self.shelf.steps()
        if step in steps:
            self.tell(f"the checkpoint of step {step} was saved, but {LATEST} does not name it: {reason}")
            return
        last = f"the last one is of step {steps[-1]}" if steps else "there is none yet"
        self.tell(f"the checkpoint of step {step} was not saved: {reason}; training goes on, and {last}")
        self.note({"not_saved": step, "reason": reason})


def _manifest(step: int, reports: list[dict[str, Any]], about: Mapping[str, Any]) -> Manifest:
    written = {
        part_name(rank): (
            Part.model_validate(report["part"]),
            {name: Entry.model_validate_json(json.dumps(entry)) for name, entry in report["entries"].items()},
        )
        for rank, report in enumerate(reports)
    }
    parts, tensors = merged(written)
    libraries = {"torch": str(torch.__version__)}
    return Manifest(
        schema_version=SCHEMA_VERSION, step=step, libraries=libraries, parts=parts, tensors=tensors, **about
    )


def _reason(error: Exception) -> str:
    """Returns why the disk refused, without Python's number of it."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)
