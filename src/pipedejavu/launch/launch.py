"""The backend that starts a process per worker, watches over them, and ends them with the run."""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch._C._distributed_c10d import Store
from torch.multiprocessing.spawn import start_processes

from pipedejavu.facts import MemoryFile
from pipedejavu.facts.printable import tell
from pipedejavu.facts.start_phase import START
from pipedejavu.health.failure import ShortageError, WorkerError, read_failure, with_rest
from pipedejavu.health.watchdog import HeartbeatMonitor, HeartbeatPage
from pipedejavu.launch.backend import REMEDY, RunSetup, Task
from pipedejavu.launch.handover import Handover, RunForecast
from pipedejavu.launch.loopback_store import serve_store
from pipedejavu.launch.membership import Obituary
from pipedejavu.launch.worker import work
from pipedejavu.launch.worker_process import WorkerLaunch, WorkerProcess
from pipedejavu.planner.replan import relieve
from pipedejavu.run.run_folder import RunFolder
from pipedejavu.run.stop_signal import GRACE_S, STOPPED, on_stop, stopped
from pipedejavu.run.worker_result import WorkerResult, lead_of
from pipedejavu.session.rank_group import RankGroup
from pipedejavu.source.task import prepare

POLL_S = 1.0
"""How often the launcher checks whether its workers have used up their time to stop."""


class ProcessBackend:
    """Runs every worker in a process of its own on this host."""

    def __init__(self) -> None:
        self.ranks = RankGroup()
        self._results: list[WorkerResult] = []

    def prepare(self, folder: RunFolder, setup: RunSetup) -> RunSetup:  # noqa: ARG002
        """Returns the setup as it is: this host has the run folder."""
        return setup

    def run(self, folder: RunFolder, setup: RunSetup, forecast: RunForecast | None) -> bytes:
        """Runs the workers; returns the switch that they, or a device without memory, left in the folder."""
        options, program, _ = setup
        try:
            handover = Handover(program, forecast)
            results = run_workers(folder, len(program.workers), options.hang_after_s, handover=handover)
        except ShortageError as shortage:
            method = prepare(options.replace(weights=None), program.sizes, program.plan.cut.begins).batches.cut.method
            switch = relieve(program, shortage, None if method == "chain" else program.plan.feed.samples)
            if options.on_oom == "stop":
                raise WorkerError(f"{switch.reason}; {REMEDY}") from None
            tell(f"{switch.reason}: the run goes on with it")
            switch.save(folder.switch)
            results = None
        if results is None:
            return folder.switch.read_bytes()
        self._results = results
        return b""

    def run_task(self, folder: RunFolder, setup: RunSetup, task: Task, most: int) -> None:
        """Runs a task in processes of its own, one per worker but at most `most`."""
        size = min(len(setup.program.workers), most)
        run_workers(folder, size, setup.options.hang_after_s, partial(_run_task, task), Handover(setup.program))

    def finish(self, folder: RunFolder) -> list[WorkerResult]:
        """Returns the results, once the folder has taken over what the lead could not write."""
        folder.adopt(lead_of(self._results).facts["pending"])
        return self._results


def _run_task(task: Task, rank: int, size: int, launched: WorkerLaunch) -> None:
    """Runs a task in a process that was started for it."""
    with WorkerProcess(rank, size, launched) as process:
        task(rank, size, process.folder, RunSetup(process.folder.options(), process.handover.program, None))


@contextmanager
def _passive_wait(size: int) -> Iterator[None]:
    """Makes the OpenMP threads of several workers sleep between operations, unless the user has set the policy.

    By default OpenMP threads spin for a while, which takes cores from other workers and from message threads.
    """
    name = "OMP_WAIT_POLICY"
    is_ours = size > 1 and name not in os.environ
    if is_ours:
        os.environ[name] = "passive"
    try:
        yield
    finally:
        if is_ours:
            del os.environ[name]


def run_workers(
    folder: RunFolder,
    size: int,
    silent_s: float | None = None,
    entry: Callable[[int, int, WorkerLaunch], None] | None = None,
    handover: Handover | None = None,
) -> list[WorkerResult] | None:
    """Starts one process per worker and waits for all of them; kills them when the wait ends for any reason.

    Returns their results, or None if the run switches plans. Workers exchange everything through memory, so a full
    disk cannot stop them. On SIGTERM or SIGHUP they finish an update and save it within a grace period, and
    StoppedError is raised. A worker without a heartbeat for `silent_s` ends the run. The results have an empty one for
    each worker that died while the others went on.
    """
    if START.seconds and not START.is_over:
        folder.add_metrics({"start": START.of_process()})
        START.is_over = True
    store, page, program = serve_store(), MemoryFile("heartbeats"), MemoryFile("program")
    outputs = [MemoryFile("result") for _ in range(size)]
    try:
        Path(program.path).write_bytes(handover.pack() if handover else b"")
        heartbeat_monitor = HeartbeatMonitor(HeartbeatPage(Path(page.path), size), size, silent_s)
        paths = tuple(file.path for file in outputs)
        launched = WorkerLaunch(str(folder.path), store.port, page.path, paths, program.path)
        with _passive_wait(size):
            context = start_processes(  # type: ignore[no-untyped-call]
                entry or work, args=(size, launched), nprocs=size, join=False, start_method="spawn"
            )
        obituary = Obituary(store)
        number = _wait(folder, context.processes, store, heartbeat_monitor, obituary)
        results = [
            WorkerResult.unpack(load_file(file.path)) if file.size_bytes else WorkerResult.of_dead()
            for rank, file in enumerate(outputs)
            if file.size_bytes or rank in obituary.workers
        ]
    finally:
        for file in (page, program, *outputs):
            file.close()
    if number is None:
        return results
    if not number:
        return None
    if any(result.is_lead for result in results):
        folder.adopt(lead_of(results).facts["pending"])
        folder.write_pending()
    raise stopped(folder, number)


def _wait(
    folder: RunFolder,
    processes: Sequence[Any],
    store: Store,
    heartbeat_monitor: HeartbeatMonitor,
    obituary: Obituary,
) -> int | None:
    """Waits for workers and kills what is left; returns the signal that stopped them, 0 for a plan switch, or None."""
    last_s, number = math.inf, 0

    def stop(signalled: int) -> None:
        nonlocal last_s, number
        last_s, number = min(last_s, time.monotonic() + GRACE_S), signalled
        for process in processes:
            process.terminate()

    with on_stop(stop):
        try:
            while True:
                codes = [process.exitcode for process in processes]
                is_switched = _are_stopped(codes) and not number and folder.switch.exists()
                if is_switched or time.monotonic() > last_s or _are_stopped(codes, number):
                    return 0 if is_switched else number or signal.SIGTERM
                if any(code not in (None, 0, STOPPED) for code in obituary.note(codes)):
                    raise _failure(folder, store, processes, obituary)
                if None not in codes:
                    return None
                if missed := heartbeat_monitor.missed(rank for rank, code in enumerate(codes) if code is None):
                    raise WorkerError(with_rest(f"{missed}; all others were stopped", folder.checkpoint_dir.steps()))
                # All that ran when `codes` was read: one that has ended since then must wake this wait.
                wait([process.sentinel for process, code in zip(processes, codes, strict=True) if code is None], POLL_S)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _are_stopped(codes: Sequence[int | None], number: int = 0) -> bool:
    """Whether all workers have ended and one was told to stop, or the run's signal `number` has ended one at once."""
    is_killed = bool(number) and not {-signal.SIGTERM, -signal.SIGHUP}.isdisjoint(codes)
    return is_killed or (None not in codes and STOPPED in codes)


def _failure(folder: RunFolder, store: Store, processes: Sequence[Any], obituary: Obituary) -> BaseException:
    """Returns the error to raise, after giving processes a second to end by themselves.

    An outlived worker is its cause only if no other was killed.
    """
    last_s = time.monotonic() + 1.0
    for process in processes:
        process.join(max(0.0, last_s - time.monotonic()))
    codes = [process.exitcode for process in processes]
    if -signal.SIGINT in codes:
        return KeyboardInterrupt()
    needed = obituary.needed(codes)
    error = read_failure(store, needed if min(code or 0 for code in needed) < 0 else codes)
    if isinstance(error, ShortageError):
        return error
    return type(error)(with_rest(str(error), folder.checkpoint_dir.steps()))
