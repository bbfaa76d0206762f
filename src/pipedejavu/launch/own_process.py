"""The backend of one worker on a GPU: this process, which has torch, the model and the compiled units, runs it.

A process of its own would load torch, connect to the GPU, build the model and compile its units a second time.
"""

import gc
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from pipedejavu.engine.device import device_of
from pipedejavu.facts import InputError
from pipedejavu.facts.printable import tell
from pipedejavu.health.failure import ShortageError, WorkerError, with_rest
from pipedejavu.launch.backend import REMEDY, RunSetup
from pipedejavu.launch.handover import RunForecast
from pipedejavu.launch.launch import ProcessBackend
from pipedejavu.launch.loopback_store import serve_store
from pipedejavu.launch.worker import Rank
from pipedejavu.planner.replan import relieve
from pipedejavu.program import Program
from pipedejavu.run.run_folder import RunFolder
from pipedejavu.run.stop_signal import stop_signals, stopped
from pipedejavu.source.task import Prepared, reorder


def is_for_own_process(program: Program) -> bool:
    """Whether a program has one worker, on a GPU that this process reaches."""
    return len(program.workers) == 1 and program.copies == 1 and device_of(program, 0).type == "cuda"


class OwnProcessBackend(ProcessBackend):
    """Runs the only worker of a program in this process, on the model that was measured, if there is one.

    After a switch to a plan with several workers, each has a process of its own.
    """

    def __init__(self, prepared: Prepared | None = None, *, is_forced: bool = False):
        """Takes the model that was built for planning; `is_forced` runs workers on the CPU here too."""
        super().__init__()
        self._prepared, self._is_forced = prepared, is_forced

    def run(self, folder: RunFolder, setup: RunSetup, forecast: RunForecast | None) -> bytes:
        """Runs the worker; returns the switch that it, or a device without memory, left in the folder."""
        if not (is_for_own_process(setup.program) or (self._is_forced and len(setup.program.workers) == 1)):
            return super().run(folder, setup, forecast)
        assert forecast is not None
        with _group_of_one() as store:
            shortage, samples = self._run_here(folder, setup, forecast, PrefixStore("run", store))
        _free_memory()
        if shortage is None:
            return b"" if self._results else folder.switch.read_bytes()
        switch = relieve(setup.program, shortage, samples)
        if setup.options.on_oom == "stop":
            raise WorkerError(f"{switch.reason}; {REMEDY}")
        tell(f"{switch.reason}: the run goes on with it")
        switch.save(folder.switch)
        return folder.switch.read_bytes()

    def _run_here(
        self, folder: RunFolder, setup: RunSetup, forecast: RunForecast, store: Store
    ) -> tuple[ShortageError | None, int | None]:
        """Runs the worker to its end; returns a shortage of memory, with the samples that another plan must keep."""
        self.ranks.checkpoint_dir = folder.checkpoint_dir
        watchdog, rank = self.ranks.start_watchdog(setup.options), None
        self._results = []
        try:
            _free_memory()  # peaks are those of the run, not of the measurements before
            prepared = self._reused(setup)
            rank = Rank(setup.options, setup.program, store, folder, folder.start(), watchdog, forecast, prepared)
            result = rank.run(folder.checkpoint_dir)
        except ShortageError as shortage:
            _forget_frames(shortage)
            samples = rank.microbatch_samples if rank else None
            return ShortageError(shortage.worker, shortage.found_bytes), samples
        except InputError:
            raise
        except Exception as error:
            raise _explain(error, folder) from None
        finally:
            watchdog.stop()
        if rank.is_stopped and rank.stop_signal.number:
            folder.write_pending()
            raise stopped(folder, rank.stop_signal.number)
        self._results = [] if rank.is_stopped else [result.on_host()]
        return None, None

    def _reused(self, setup: RunSetup) -> Prepared | None:
        """Returns the model that was built for planning, once, if it is what the worker would build."""
        prepared, self._prepared = self._prepared, None
        is_new = setup.start is None or not setup.start.step
        if prepared is None or setup.options.weights is not None or not is_new:
            return None
        begins = setup.program.plan.cut.begins
        if begins and tuple(begins) != prepared.batches.cut.begins:
            return None
        return reorder(prepared, setup.options, setup.program.sizes)


@contextmanager
def _group_of_one() -> Iterator[Store]:
    """Makes this process the only rank of a process group, and restores what a worker's set-up changes."""
    threads, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    handlers = {number: signal.getsignal(number) for number in stop_signals()}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = serve_store()
    dist.init_process_group("gloo", store=PrefixStore("group", store), rank=0, world_size=1)
    try:
        yield store
    finally:
        dist.destroy_process_group()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(mode)


def _explain(error: Exception, folder: RunFolder) -> WorkerError:
    """Returns the error of a worker that failed, with its traceback unless it says all itself."""
    if isinstance(error, WorkerError):
        return WorkerError(with_rest(str(error), folder.checkpoint_dir.steps()))
    lines = "".join(traceback.format_exception(error))
    _forget_frames(error)
    sentence = f"worker 0 raised {type(error).__name__}"
    return WorkerError(with_rest(f"{lines}{sentence}", folder.checkpoint_dir.steps()))


def _forget_frames(error: BaseException | None) -> None:
    """Lets go of what the frames of an error and of its causes hold, above all memory of the GPU."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _free_memory() -> None:
    """Frees what measurements or a worker that has ended held, and forgets its peaks."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    sys.stderr.flush()
