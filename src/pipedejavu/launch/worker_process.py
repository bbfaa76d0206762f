"""The process of one worker that our launcher started: its rendezvous, its watchdog, and how it ends."""

import os
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, NoReturn, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from pipedejavu.engine.device import be_deterministic
from pipedejavu.facts import end_with_parent, keep_heap
from pipedejavu.facts.start_phase import START, process_age_s
from pipedejavu.health.failure import keep_failure, write_failure
from pipedejavu.health.watchdog import HangWatchdog, HeartbeatPage
from pipedejavu.launch.handover import Handover
from pipedejavu.launch.loopback_store import connect_store
from pipedejavu.planner.worker_host import num_threads
from pipedejavu.program import Program
from pipedejavu.run.run_folder import RunFolder


class WorkerLaunch(NamedTuple):
    """What the launcher gives to the process of a worker; it keeps the memory files open until the worker has ended."""

    run_dir: str
    port: int
    """The port of the launcher's store."""
    heartbeats: str
    """The memory file in which each worker writes its heartbeat."""
    results: tuple[str, ...]
    """The memory file in which each worker leaves its result."""
    handover: str
    """The memory file with the program and its forecast."""


class WorkerProcess:
    """A process that our launcher started for one worker: a block that trains, after which the process ends.

    The store is the launcher's, and sockets are on loopback only.
    """

    def __init__(self, rank: int, size: int, launched: WorkerLaunch):
        START.add("import", process_age_s())
        end_with_parent()
        # On Ctrl-C the launcher kills its workers at once, even if they wait for something.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self.rank, self.launched = rank, launched
        self.folder, self._store = RunFolder(launched.run_dir), connect_store(launched.port)
        self.store = PrefixStore("run", self._store)
        self.code, self.result = 0, b""
        """The exit code of the process, and the bytes of its result."""
        try:
            self.watchdog = HangWatchdog(rank, self._end_hung, HeartbeatPage(Path(launched.heartbeats), size))
            rendezvous = PrefixStore("group", connect_store(launched.port))
            dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=size)
            self.handover = Handover.unpack(Path(launched.handover).read_bytes())
        except BaseException as error:
            self._end(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                Path(self.launched.results[self.rank]).write_bytes(self.result)
        except BaseException as failed:
            error = failed
        self._end(error)

    def _end(self, error: BaseException | None) -> NoReturn:
        """Ends the process, once the launcher has this rank's result or failure.

        That skips the interpreter's shutdown, which would wait for lanes that are blocked, and sometimes aborts while
        C++ threads are still running.
        """
        if error is not None:
            write_failure(self._store, self.rank, error)
        sys.stderr.flush()
        os._exit(self.code if error is None else 1)

    def _end_hung(self, trace: str, sentence: str) -> None:
        keep_failure(self._store, f"hung\n{trace}{sentence}; all others were stopped")
        os._exit(1)


def set_up_process(program: Program, rank: int, *, is_deterministic: bool = True) -> None:
    """Sets this process to the number of threads of its worker, and makes torch deterministic if asked to."""
    keep_heap()
    torch.set_num_threads(num_threads(program.machine, program.devices, rank))
    if is_deterministic:
        be_deterministic()
