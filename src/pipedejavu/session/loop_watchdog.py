"""Watchdogs over the workers of a Trainer: an action that hangs ends the step, or on ranks the process."""

import os
import weakref
from functools import partial

from pipedejavu.engine import Threads
from pipedejavu.facts.printable import print_error
from pipedejavu.health.failure import WorkerError
from pipedejavu.health.watchdog import HangWatchdog
from pipedejavu.session.rank_rounds import Workers


def start_watchdogs(workers: Workers, forecast_s: float, hang_after_s: float | None) -> None:
    """Starts a watchdog over the lanes of each worker, given the forecast of an update.

    It stops when the workers are freed.
    """
    end = partial(_give_up, weakref.ref(workers)) if isinstance(workers, Threads) else _end_process
    for worker in workers.handlers:
        watchdog = HangWatchdog(worker.index, end, option="hang_after_s")
        watchdog.allow(forecast_s, hang_after_s)
        worker.notice = watchdog.notice
        weakref.finalize(workers, watchdog.stop)


def _give_up(threads: "weakref.ref[Threads]", trace: str, sentence: str) -> None:
    if running := threads():
        error = WorkerError(sentence)
        error.add_note(f"There it is in the code:\n{trace}")
        running.give_up(error)


def _end_process(trace: str, sentence: str) -> None:
    """Ends a rank: what it waits for may never come, and the other ranks notice its end."""
    print_error(f"{trace}pipedejavu: {sentence}")
    os._exit(1)
