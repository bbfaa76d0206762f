"""The process of one worker that our launcher started: its rendezvous, its watchdog, and how it ends."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from pipedejavu.engine.device import be_deterministic
from pipedejavu.facts import end_with_parent, keep_heap
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


Run = Callable[[RunFolder, Store, HangWatchdog, Handover], tuple[int, bytes]]
"""Runs a rank; returns the exit code of its process and the bytes of its result."""


def run_process(rank: int, size: int, launched: WorkerLaunch, run: Run) -> None:
    """Runs a rank in a process that our launcher started, then ends the process with the code that `run` returns.

    The store is the launcher's, and sockets are on loopback only.
    """
    end_with_parent()
    # On Ctrl-C the launcher kills its workers at once, even if they wait for something.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    folder, store, code = RunFolder(launched.run_dir), connect_store(launched.port), 1

    def end(trace: str, sentence: str) -> None:
        keep_failure(store, f"hung\n{trace}{sentence}; all others were stopped")
        os._exit(1)

    try:
        watchdog = HangWatchdog(rank, end, HeartbeatPage(Path(launched.heartbeats), size))
        rendezvous = PrefixStore("group", connect_store(launched.port))
        dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=size)
        handover = Handover.unpack(Path(launched.handover).read_bytes())
        code, result = run(folder, PrefixStore("run", store), watchdog, handover)
        Path(launched.results[rank]).write_bytes(result)
    except BaseException as error:
        write_failure(store, rank, error)
    # The launcher has this rank's result or failure. Exiting here skips the interpreter's shutdown, which would wait
    # for lanes that are blocked, and sometimes aborts while C++ threads are still running.
    sys.stderr.flush()
    os._exit(code)


def set_up_process(program: Program, rank: int) -> None:
    """Sets this process to the number of threads of its worker, and makes torch deterministic."""
    keep_heap()
    torch.set_num_threads(num_threads(program.machine, program.devices, rank))
    be_deterministic()
