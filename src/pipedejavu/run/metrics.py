"""Metrics of a run in progress: every rank reports losses and memory to one of them, the lead, through a store.

Reports run in threads beside the program and never block it, so asynchronous plans report like synchronous ones.
"""

import json
import math
import resource
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch._C._distributed_c10d import Store

from pipedejavu.engine import Batches, Log
from pipedejavu.facts import Span
from pipedejavu.run.logbook import Logbooks
from pipedejavu.run.progress import Memory, Progress
from pipedejavu.run.run_folder import RunFolder
from pipedejavu.run.throughput import RoundTimes, ThroughputMonitor

INTERVAL_S = 0.25
"""Seconds between two reports."""
PATIENCE_S = 5.0
"""How long a checkpoint waits for reports in flight."""


def resident_bytes() -> int:
    """Returns the resident memory of this process; its peak if the system does not state the current value."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def most_resident_bytes() -> int:
    """Returns the peak resident memory of this process; `getrusage` alone may include that of its parent."""
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def busy_lanes(spans: Sequence[Span]) -> dict[str, float]:
    """Returns the busy fraction of each lane up to the end of the last span; receives count as waiting."""
    busy: dict[str, float] = defaultdict(float)
    length_s = max((span.end_s for span in spans), default=0.0)
    for span in spans if length_s else ():
        if not span.action.startswith("RECV"):
            busy[span.lane] += (span.end_s - span.start_s) / length_s
    return dict(busy)


class MetricsReporter:
    """Sends the reports of one rank; on the lead, also runs the collector of all reports."""

    def __init__(
        self,
        store: Store,
        rank: int,
        batches: Batches,
        device: torch.device,
        collector: "MetricsCollector | None",
    ):
        self.store, self.rank, self.batches, self.device, self.collector = store, rank, batches, device, collector
        self.started_s = time.perf_counter()
        self.busy: dict[str, float] = {}
        """Busy fraction of each lane in the last round."""
        self._log, self._taken, self._number = Log(), 0, 0
        self._pending: list[tuple[int, float, int, float]] = []
        self._rounds: list[RoundTimes] = []
        self._skips: set[int] = set()
        """Skipped updates that were reported already."""
        self._lock, self._sending, self._ended = threading.Lock(), threading.Lock(), threading.Event()
        # The collector has its own thread: it writes to the disk, which may block, and reports must go on.
        tasks = (self._go, self._take_reports) if collector else (self._go,)
        self._threads = [threading.Thread(target=task, daemon=True) for task in tasks]

    def __enter__(self) -> Self:
        self.started_s = time.perf_counter()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        if error is None:
            self.send()

    def follow(self, log: Log) -> None:
        """Reports the losses of `log` from now on."""
        with self._lock:
            self._log, self._taken = log, 0

    def settle(self, spans: Sequence[Span] = (), times: RoundTimes | None = None) -> None:
        """Collects the losses and spans of a finished round, and its times if given."""
        self.busy = busy_lanes(spans) if spans else self.busy
        self._take()
        with self._lock:
            self._rounds += [] if times is None else [times]
            self._log.forget_losses()
            self._taken = 0

    def peak(self) -> Memory:
        """Returns the peak memory of this process and its GPU."""
        host = most_resident_bytes()
        if self.device.type != "cuda":
            return Memory(host, 0)
        return Memory(host, torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device))

    def send(self) -> None:
        """Sends everything new to the lead."""
        self._take()
        with self._sending:
            with self._lock:
                losses, self._pending = self._pending, []
                rounds, self._rounds = self._rounds, []
                skipped = [(step, reason) for step, reason in [*self._log.skipped.items()] if step not in self._skips]
                self._skips |= {step for step, _ in skipped}
            report = json.dumps([losses, self.peak(), self.busy, rounds, skipped])
            self.store.set(f"{self.rank}/{self._number}", report)
            self._number += 1

    def _take(self) -> None:
        now_s = time.perf_counter()
        with self._lock:
            losses, noted_s = list(self._log.losses.items())[self._taken :], self._log.noted_s
            self._taken += len(losses)
            self._pending += [
                (n, loss, self.batches.count(n), noted_s.get(n, now_s) - self.started_s) for n, loss in losses
            ]

    def _go(self) -> None:
        with suppress(RuntimeError):  # the process that hosts the store has ended; the run itself reports why
            while not self._ended.wait(INTERVAL_S):
                self.send()

    def _take_reports(self) -> None:
        assert self.collector is not None
        with suppress(RuntimeError):
            while not self._ended.wait(INTERVAL_S):
                self.collector.take_all(self.store)


@dataclass(frozen=True)
class ManifestFields:
    """What a checkpoint's manifest says besides its tensors; called once all shard files are on disk."""

    step: int
    samples: int
    """The number of the next sample."""
    fields: Mapping[str, Any]
    collector: "MetricsCollector | None"

    def __call__(self) -> Mapping[str, Any]:
        """Returns the fields, with the mean loss since the last checkpoint, once the metrics have it."""
        loss = self.collector.mean_loss(self.step) if self.collector else None
        return {"samples": self.samples, "loss": loss, **self.fields}


class MetricsCollector:
    """Adds up the reports of all ranks on the lead: writes one metrics line per finished update and shows progress."""

    def __init__(
        self,
        folder: RunFolder,
        progress: Progress,
        books: Logbooks,
        num_ranks: int,
        update_size: int,
        num_samples: int,
        throughput: ThroughputMonitor | None = None,
    ):
        """`update_size` is the number of microbatches per update, `num_samples` the number of samples."""
        self.folder, self.progress, self.books = folder, progress, books
        self.update_size, self.num_samples, self.throughput = update_size, num_samples, throughput
        self.taken = [0] * num_ranks
        self.step = progress.done + 1
        self.elapsed_s = folder.elapsed_s()
        """Training time of the run before this process."""
        self.losses: dict[int, float] = {}
        """Loss of each step since the last checkpoint."""
        self.skipped: set[int] = set()
        """Steps whose update was skipped."""
        self.memory = Memory(0, 0)
        self._sums: dict[int, dict[int, tuple[float, int, float]]] = defaultdict(dict)
        """By step, the loss of each of its microbatches, with its count and its time."""
        self._num_taken = 0
        """Samples of the steps so far."""
        self._left_out: set[int] = set()
        """Microbatches of each update that may stay without a loss."""

    def take_all(self, store: Store) -> None:
        """Processes every report that has arrived."""
        left_out = frozenset(self._left_out)  # before the last reports of a rank that has died are taken
        for rank in range(len(self.taken)):
            while store.check([key := f"{rank}/{self.taken[rank]}"]):
                losses, peak, busy, rounds, skipped = json.loads(store.get(key))
                store.delete_key(key)
                self._take_skipped(skipped)
                self._take(rank, losses, peak, busy)
                if self.throughput:
                    self.throughput.take(rank, (RoundTimes(*times) for times in rounds))
                self.taken[rank] += 1
        while (rows := self._sums[self.step]) and left_out.issuperset({*range(self.update_size)} - rows.keys()):
            self._finish([*self._sums.pop(self.step).values()])

    def leave_out(self, microbatches: Iterable[int]) -> None:
        """Waits no longer for the losses of these microbatches of each update: their worker has died."""
        self._left_out.update(microbatches)

    def _take(
        self, rank: int, losses: list[tuple[int, float, int, float]], peak: list[int], busy: dict[str, float]
    ) -> None:
        self.memory = Memory(*map(max, self.memory, peak))
        self.progress.see(rank, Memory(*peak), busy)
        for microbatch, loss, count, at_s in losses:
            update, number = divmod(microbatch, self.update_size)
            self._sums[update + 1][number] = (loss, count, at_s)

    def _take_skipped(self, skipped: list[tuple[int, str]]) -> None:
        """Records skipped updates once each; several workers may report the same one."""
        for step, reason in skipped:
            if step not in self.skipped:
                self.skipped.add(step)
                self.progress.num_skipped += 1
                self.folder.add_metrics({"skipped": step, "reason": reason})

    def _finish(self, rows: list[tuple[float, int, float]]) -> None:
        count = sum(row[1] for row in rows)
        loss, at_s = sum(row[0] for row in rows) / count, max(row[2] for row in rows)
        self.losses[self.step] = loss
        samples = self.num_samples * len(rows) // self.update_size  # fewer only if all microbatches have one size
        line = {"step": self.step, "loss": loss, "count": count, "samples": samples}
        line["elapsed_s"] = self.elapsed_s + at_s
        self.folder.add_metrics({**line, **self.memory.form()})
        self._num_taken += samples
        rate = self._num_taken / at_s if at_s else 0.0
        figures = {"loss": loss, "samples_per_s": rate, "elapsed_s": line["elapsed_s"], **self.memory.form()}
        self.books.add(self.step, figures)
        self.progress.report(self.step, loss, count, self.memory, at_s)
        self.step += 1

    def add_evaluation(
        self, about: Mapping[str, Any], figures: Mapping[str, float], at_s: float, took_s: float
    ) -> None:
        """Adds the figures of an evaluation, `at_s` after the start of this process."""
        elapsed_s = self.elapsed_s + at_s
        self.folder.add_metrics({**about, **figures, "elapsed_s": elapsed_s, "took_s": took_s})
        self.books.add(about["evaluated"], {**figures, "epoch": about["epoch"]})
        self.progress.show_evaluation(about["evaluated"], figures, took_s)

    def mean_loss(self, step: int) -> float | None:
        """Returns the mean loss of the steps since the last call, up to `step`; None if it is not finite.

        Waits until the metrics contain these steps, so that a checkpoint has the metrics of every step before it.
        """
        last_s = time.perf_counter() + PATIENCE_S
        while self.step <= step and time.perf_counter() < last_s:
            time.sleep(INTERVAL_S / 10)
        losses = [self.losses.pop(known) for known in list(self.losses) if known <= step]
        mean = sum(losses) / len(losses) if losses else math.nan
        return mean if math.isfinite(mean) else None
