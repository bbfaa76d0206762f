"""Writes checkpoints in the background while training goes on: each rank its shard file, the lead also the manifest.

Ranks report what they wrote through a key-value store, so that only the lead's saver waits for the others; the lead is
rank 0 unless the caller says otherwise. If a write fails the run loses that checkpoint and goes on: the reason is
reported, and earlier checkpoints stay. The last checkpoint of a run is retried for a while, and then written to another
disk.
"""

import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore, Store

from pipedejavu.facts import InputError, format_bytes
from pipedejavu.store.checkpoint_dir import LATEST, CheckpointDir, merged, shard_name
from pipedejavu.store.manifest import SCHEMA_VERSION, CheckpointError, Manifest, ShardFile, TensorEntry
from pipedejavu.store.shard_file import Tensors, is_storable, write_shard

PATIENCE_S = 10.0
"""How long the last checkpoint is retried; shorter than the time that a stopping run is given."""
RETRY_S = 0.5
SLOW_S = 30.0
"""After how long a slow save is reported, and the next checkpoint is skipped."""
_LOOK_S = 0.01
"""How often the lead polls for the reports of the other ranks."""

_PATIENCE_S = 10.0
"""How long a failed rank waits for the others to complete a checkpoint."""

About = Callable[[], Mapping[str, Any]]
"""Returns the manifest's fields other than its files and tensors; called when all tensors are on disk."""
Reports = dict[int, dict[str, Any]]
"""By rank, what it says of its shard file."""


def _nowhere(size_bytes: int) -> Path:
    raise OSError(f"there is no other folder for {format_bytes(size_bytes)}")


class Saver:
    """Writes one rank's shard file of each checkpoint, one checkpoint at a time."""

    def __init__(
        self,
        checkpoint_dir: CheckpointDir,
        *,
        rank: int = 0,
        store: tuple[Store, int] | None = None,
        tell: Callable[[str], None] = print,
        note: Callable[[dict[str, Any]], None] = lambda _: None,
        fallback: Callable[[int], Path] = _nowhere,
        lead: int = 0,
        is_dead: Callable[[int], bool] = lambda _: False,
    ):
        """Takes the checkpoint directory that all ranks share, and in `store` their key-value store and number.

        `tell` receives messages for the user, `note` a row of metrics per checkpoint. `fallback` returns a folder on
        another disk with the given number of bytes free, or raises OSError. `is_dead` says whether another rank has
        ended for good. Only the lead calls these two.
        """
        self.checkpoint_dir, self.rank, self.tell, self.note, self.fallback = (
            checkpoint_dir,
            rank,
            tell,
            note,
            fallback,
        )
        self.key_store, self.size = store or (HashStore(), 1)
        self.lead, self.is_dead = lead, is_dead
        self.moved: dict[int, Path] = {}
        """Folders of checkpoints that were written to another disk, by step."""
        self._thread: threading.Thread | None = None
        self._staging: Path | None = None
        """Folder that the newest checkpoint is written to."""
        self._step, self._started_s = 0, 0.0
        self._left_out: list[tuple[int, str]] = []
        """Checkpoints that the lead has skipped but other ranks may have written to, with the reason."""
        self._others = [other for other in range(self.size) if other != lead]
        """The other ranks that write a shard file of the newest checkpoint."""

    @property
    def is_lead(self) -> bool:
        """Whether this rank completes the checkpoints."""
        return self.rank == self.lead

    def save(
        self, step: int, tensors: Tensors, about: About, *, is_last: bool = False, absent: Collection[int] = ()
    ) -> None:
        """Writes tensors in a background thread; the saver owns them from here on.

        Waits for the previous save; if that takes too long this checkpoint is skipped, unless it is the last. The ranks
        in `absent` have no part in it.
        """
        for name, tensor in tensors.items():
            if not is_storable(tensor):
                raise InputError(f"a checkpoint cannot hold '{name}' of type {tensor.dtype}; keep it in another type")
        if self._thread is not None:
            self._thread.join(None if is_last else SLOW_S)
            if self._thread.is_alive():
                self._leave_out(step)
                return
        self._step, self._started_s = step, time.perf_counter()
        self._others = [other for other in self._others if other not in absent]
        self._thread = threading.Thread(target=self._write, args=(step, tensors, about, is_last))
        self._thread.start()

    def wait(self) -> None:
        """Waits until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._remove_skipped()

    def finish(self) -> None:
        """Waits a few seconds for a started checkpoint to complete, since a rank that ends stops all ranks."""
        last_s = time.monotonic() + _PATIENCE_S
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)
        while self._staging is not None and self._staging.exists() and time.monotonic() < last_s:
            time.sleep(_LOOK_S)

    def _leave_out(self, step: int) -> None:
        """Skips a checkpoint because the previous one is still being written; does not touch the disk."""
        took_s = time.perf_counter() - self._started_s
        reason = f"that of step {self._step} is still being written after {took_s:.0f} s"
        if not self.is_lead:
            self._send(step, {"failed": reason, "size_bytes": 0})
            return
        self._left_out.append((step, reason))
        self.tell(f"the checkpoint of step {step} is left out: {reason}; training goes on")

    def _remove_skipped(self) -> None:
        """Removes what other ranks have written for checkpoints that the lead has skipped."""
        while self._left_out:
            step, reason = self._left_out.pop(0)
            for rank in self._others:
                self._take_report(step, rank)
            self.checkpoint_dir.discard(step)
            self.note({"not_saved": step, "reason": reason})

    def _write(self, step: int, tensors: Tensors, about: About, is_last: bool) -> None:
        self._remove_skipped()
        with self._watched(step, is_last):
            if self.is_lead:
                self._complete_all(step, tensors, cache(about), is_last)
            else:
                self._follow(step, tensors, is_last)

    def _follow(self, step: int, tensors: Tensors, is_last: bool) -> None:
        """Writes this rank's shard file; retries the last checkpoint when and where the lead says."""
        path = str(self.checkpoint_dir.path)
        while path:
            checkpoint_dir = CheckpointDir(path)
            if path == str(self.checkpoint_dir.path) or checkpoint_dir.path.is_dir():
                report = self._write_shard(checkpoint_dir, step, tensors)
            else:
                report = {"failed": f"worker {self.rank} does not see {path}", "size_bytes": 0}
            self._send(step, report)
            path = self._take(f"{step}/again/{self.rank}").decode() if is_last else ""
        tensors.clear()

    def _complete_all(self, step: int, tensors: Tensors, about: About, is_last: bool) -> None:
        """Writes the lead's shard file and completes the checkpoint; retries the last one, then tries another disk."""
        checkpoint_dir, until_s = self.checkpoint_dir, 0.0
        while True:
            reports = {self.rank: self._write_shard(checkpoint_dir, step, tensors)}
            if not is_last:
                tensors.clear()
            reports |= {rank: self._take_report(step, rank) for rank in self._others}
            reason = self._complete(checkpoint_dir, step, reports, about)
            if not is_last:
                break
            is_retried = bool(reason) and not any(map(self.is_dead, self._others))
            if is_retried and not until_s:
                until_s = time.monotonic() + PATIENCE_S
                self.tell(f"the checkpoint of step {step} was not saved: {reason}; trying for {PATIENCE_S:.0f} s")
            retry_dir = self._retry_dir(checkpoint_dir, until_s, reports) if is_retried else None
            for rank in self._others:
                self.key_store.set(f"{step}/again/{rank}", str(retry_dir.path) if retry_dir else "")
            if retry_dir is None:
                break
            checkpoint_dir = retry_dir
        tensors.clear()
        if reason:
            self._say_failed(step, reason, is_last)

    def _retry_dir(self, checkpoint_dir: CheckpointDir, until_s: float, reports: Reports) -> CheckpointDir | None:
        """Returns where to retry the last checkpoint, or None to give up."""
        if time.monotonic() < until_s:
            time.sleep(RETRY_S)
            return checkpoint_dir
        if checkpoint_dir is not self.checkpoint_dir:
            return None
        try:
            return CheckpointDir(self.fallback(sum(report["size_bytes"] for report in reports.values())))
        except OSError:
            return None

    def _complete(self, checkpoint_dir: CheckpointDir, step: int, reports: Reports, about: About) -> str:
        """Commits a checkpoint once all ranks have written; returns the reason if it fails, else an empty string."""
        failed = [report["failed"] for report in reports.values() if "failed" in report]
        try:
            if failed:
                raise OSError(failed[0])
            manifest = _manifest(step, reports, about())
            checkpoint_dir.commit(step, manifest)
        except OSError as error:
            checkpoint_dir.discard(step)
            if step not in checkpoint_dir.steps():
                return _reason(error)
            self.tell(f"the checkpoint of step {step} was saved, but {LATEST} does not name it: {_reason(error)}")
            return ""
        if checkpoint_dir is not self.checkpoint_dir:
            self.moved[step] = checkpoint_dir.folder(step)
            self.tell(
                f"the checkpoint of step {step} is in {checkpoint_dir.path};"
                f" move it to {self.checkpoint_dir.path} before --resume"
            )
            return ""
        took_s = time.perf_counter() - self._started_s
        self.note({"saved": step, "size_bytes": manifest.size_bytes, "took_s": took_s})
        try:
            checkpoint_dir.prune()
        except (CheckpointError, OSError) as error:
            self.tell(f"the checkpoint of step {step} was written, but {_reason(error)}; older ones are kept")
        return ""

    def _write_shard(self, checkpoint_dir: CheckpointDir, step: int, tensors: Tensors) -> dict[str, Any]:
        size = sum(tensor.nbytes for tensor in tensors.values())
        try:
            if self.size == 1:  # left by a killed run; with several ranks, others may already write here
                checkpoint_dir.discard(step)
            name = shard_name(self.rank)
            self._staging = checkpoint_dir.staging_dir(step)
            shard, entries = write_shard(self._staging / name, tensors)
        except OSError as error:
            reason = f"{_reason(error)} (worker {self.rank} had {format_bytes(size)} to write)"
            return {"failed": reason, "size_bytes": size}
        named = {n: entry.model_dump() for n, entry in entries.items()}
        return {"part": shard.model_dump(), "entries": named, "size_bytes": size}

    def _send(self, step: int, report: dict[str, Any]) -> None:
        self.key_store.set(f"{step}/{self.rank}", json.dumps(report))

    def _take_report(self, step: int, rank: int) -> dict[str, Any]:
        """Waits for what another rank says of its shard file; a rank that dies first has not written it."""
        while not self.key_store.check([f"{step}/{rank}"]):
            if self.is_dead(rank) and not self.key_store.check([f"{step}/{rank}"]):
                return {"failed": f"worker {rank} died before it had written its part", "size_bytes": 0}
            time.sleep(_LOOK_S)
        report: dict[str, Any] = json.loads(self._take(f"{step}/{rank}"))
        return report

    def _take(self, key: str) -> bytes:
        """Polls for a key, since a blocking get() would hold the shared connection, and removes it from the store."""
        while not self.key_store.check([key]):
            time.sleep(_LOOK_S)
        value = bytes(self.key_store.get(key))
        self.key_store.delete_key(key)
        return value

    @contextmanager
    def _watched(self, step: int, is_last: bool) -> Iterator[None]:
        """While a checkpoint is being written, lets the lead report every 30 s how long it has taken."""
        ended = threading.Event()

        def watch() -> None:
            for number in count(1):
                if ended.wait(SLOW_S):
                    return
                goes_on = "the run ends when it is written" if is_last else "training goes on"
                taken = f"writing the checkpoint of step {step} has taken {number * SLOW_S:.0f} s so far"
                self.tell(f"{taken}: the disk of {self.checkpoint_dir.path} is slow or does not answer; {goes_on}")

        if self.is_lead:
            threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _say_failed(self, step: int, reason: str, is_last: bool) -> None:
        steps = self.checkpoint_dir.steps()
        last = f"the last one is of step {steps[-1]}" if steps else "there is none yet"
        goes_on = "" if is_last else "training goes on, and "
        self.tell(f"the checkpoint of step {step} was not saved: {reason}; {goes_on}{last}")
        self.note({"not_saved": step, "reason": reason})


def _manifest(step: int, reports: Reports, about: Mapping[str, Any]) -> Manifest:
    written = {
        shard_name(rank): (
            ShardFile.model_validate(report["part"]),
            {name: TensorEntry.model_validate_json(json.dumps(entry)) for name, entry in report["entries"].items()},
        )
        for rank, report in sorted(reports.items())
    }
    shards, tensors = merged(written)
    libraries = {"torch": str(torch.__version__)}
    return Manifest(
        schema_version=SCHEMA_VERSION, step=step, libraries=libraries, parts=shards, tensors=tensors, **about
    )


def _reason(error: Exception) -> str:
    """Returns an error's message without its errno."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)
