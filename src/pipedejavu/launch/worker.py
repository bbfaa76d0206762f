"""One rank of a training run: runs its worker of the program, reports on the way, and packs what it leaves."""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from pipedejavu.engine.device import be_deterministic, device_of
from pipedejavu.engine.engine_state import check_state, final_buffers, put_state, take_norm, take_state
from pipedejavu.engine.handlers import Handlers
from pipedejavu.engine.rank_process import run_rank
from pipedejavu.engine.replicas import ReplicaCheck
from pipedejavu.engine.share_control import adjusted_counts
from pipedejavu.engine.threads import final_weights
from pipedejavu.facts import InputError, Span, WorkerSummary, end_with_parent, keep_heap
from pipedejavu.health.failure import ShortageError, WorkerError, is_shortage, keep_failure, write_failure
from pipedejavu.health.watchdog import HangWatchdog, HeartbeatPage
from pipedejavu.launch.loopback_store import connect_store
from pipedejavu.planner.replan import PlanSwitch, Replanner, find_switch
from pipedejavu.planner.worker_host import num_threads
from pipedejavu.program import ActionKind, Program
from pipedejavu.program.share import cut_evenly
from pipedejavu.run.live_view import WorkerPanel
from pipedejavu.run.logbook import open_logbooks
from pipedejavu.run.metrics import MetricsCollector, MetricsReporter, resident_bytes
from pipedejavu.run.options import TrainOptions
from pipedejavu.run.progress import Progress
from pipedejavu.run.run_folder import RunFolder, RunStart
from pipedejavu.run.saved_facts import random_state, saved_in, set_random_state
from pipedejavu.run.settings import Settings
from pipedejavu.run.stop_signal import STOPPED, StopSignal
from pipedejavu.run.throughput import RoundTimes, ThroughputMonitor, times_of
from pipedejavu.run.whole_state import WholeState
from pipedejavu.run.worker_result import WorkerResult
from pipedejavu.simulate import Prediction, simulate
from pipedejavu.source.task import SteadyBatches, num_kept, prepare
from pipedejavu.store import Checkpoint, CheckpointDir, Saver
from pipedejavu.store.saver import SLOW_S


class WorkerLaunch(NamedTuple):
    """What a process that runs a worker is given by the launcher, which holds it open until the worker has ended."""

    run_dir: str
    port: int
    """Of the launcher's store."""
    heartbeats: str
    """The memory in which each worker writes what it is at."""
    results: tuple[str, ...]
    """The memory in which each worker leaves what it ends with."""


def work(rank: int, size: int, launched: WorkerLaunch) -> None:
    """Runs a rank of a training run in a process of its own."""
    run_process(rank, size, launched, _train)


def _train(folder: RunFolder, store: Store, watchdog: HangWatchdog) -> tuple[int, bytes]:
    run = Rank(folder.options(), folder.program(), store, folder, folder.start(), watchdog)
    result = run.run(folder.checkpoint_dir)
    return (STOPPED if run.is_stopped else 0), result.pack()


Run = Callable[[RunFolder, Store, HangWatchdog], tuple[int, bytes]]
"""Runs a rank; returns the exit code of its process and what it leaves."""


def run_process(rank: int, size: int, launched: WorkerLaunch, run: Run) -> None:
    """Runs a rank that this project started itself, then ends the process with the code that `run` returns.

    The store is the launcher's, sockets are on loopback only, and nothing waits for a disk.
    """
    end_with_parent()
    # The launcher ends it, at once, whatever it waits for.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    folder, store, code = RunFolder(launched.run_dir), connect_store(launched.port), 1

    def end(trace: str, sentence: str) -> None:
        keep_failure(store, f"hung\n{trace}{sentence}; all others were stopped")
        os._exit(1)

    try:
        watchdog = HangWatchdog(rank, end, HeartbeatPage(Path(launched.heartbeats), size))
        meeting = PrefixStore("group", connect_store(launched.port))
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=size)
        code, result = run(folder, PrefixStore("run", store), watchdog)
        Path(launched.results[rank]).write_bytes(result)
    except BaseException as error:
        write_failure(store, rank, error)
    # What this rank has to say is with the launcher. Ending here spares the interpreter's shutdown, which waits for
    # lanes that wait for others, and now and then aborts a process whose C++ threads are still about.
    sys.stderr.flush()
    os._exit(code)


Move = tuple[int, tuple[tuple[int, ...], ...]]
"""An update, and the parts that the replicas of a program have from it on."""


class Rank:
    """One rank's state during a run; the first has the run folder, the others need none."""

    def __init__(
        self,
        options: TrainOptions,
        program: Program,
        store: Store,
        folder: RunFolder,
        start: RunStart,
        watchdog: HangWatchdog,
        *,
        keeps_workers: bool = False,
    ):
        """Takes whether a plan to switch to must have as many workers, as their processes are given."""
        self.options, self.program, self.store, self.folder, self.start = options, program, store, folder, start
        self.watchdog, self.keeps_workers = watchdog, keeps_workers
        self.rank = dist.get_rank()
        keep_heap()
        torch.set_num_threads(num_threads(program.machine, program.devices, self.rank))
        if options.keeps_log:  # an audit's replay has no TF32, which cuDNN takes for float32 by default
            torch.backends.cudnn.allow_tf32 = False
        be_deterministic()
        own = options.replace(weights=None) if start.step else options  # a checkpoint has them
        self.job, self.order = prepare(own, program.sizes, program.plan.cut.begins)
        self.state = WholeState(self.order.task.model, self.job.units)
        self.order.start(start.step, start.samples)
        self.order.keep(num_kept(program, self.rank))
        self.batches = SteadyBatches(self.order)
        self.replicas = ReplicaCheck(program, self.job, options.check_replicas, start.step)
        self.moves: list[Move] = []
        self.spans: list[Span] = []
        self.step = start.step
        self.ends_s: list[float] = []
        """When each round ended."""
        self.stop_signal = StopSignal(PrefixStore("halt", store), self.rank, len(program.workers))
        self.stop_signal.obey()
        self.collector: MetricsCollector | None = None
        self.pace: ThroughputMonitor | None = None
        self.replanner: Replanner | None = None
        self.saver: Saver | None = None
        self.told_s = 0.0
        """For how long the disk had not answered when that was last told."""
        self.is_stopped = False
        self.base_bytes = resident_bytes()

    def run(self, checkpoint_dir: CheckpointDir) -> WorkerResult:
        """Trains to the end, with checkpoints on a shelf that all ranks see."""
        try:
            return self._run(checkpoint_dir)
        except BaseException as error:
            if is_shortage(error):
                raise ShortageError(self.rank, self.found_bytes()) from error
            raise

    def _run(self, checkpoint_dir: CheckpointDir) -> WorkerResult:
        forecast = simulate(self.program)
        self.watchdog.allow(forecast.makespan_s / self.program.plan.steps, self.options.hang_after_s)
        updates = range(self.start.step, self.options.steps, self.program.plan.steps)
        with ExitStack() as stack:
            self._open_desk(stack, forecast)
            if self.options.checkpoint_every:
                board = (PrefixStore("saver", self.store), len(self.program.workers))
                self.saver = Saver(
                    checkpoint_dir, rank=self.rank, board=board, tell=self._tell, note=self.folder.add_metrics,
                    elsewhere=self.folder.fallback.folder,
                )  # fmt: skip
            device = device_of(self.program, self.rank)
            self.watch = MetricsReporter(self.store, self.rank, self.batches, device, self.collector, self._listen)
            with self.watch:
                try:
                    handlers = run_rank(
                        self.program, self.job, self.batches, updates, self.after_round, self.before_round,
                        partial(self._restore, checkpoint_dir),
                    )  # fmt: skip
                except InputError:
                    if self.saver:  # it holds finite state; reports are still taken, so the metrics have its steps
                        self.saver.finish()
                    raise
                check_state(handlers)  # what is left of the run is finite, too, if nothing was saved
                if self.saver:
                    self.saver.wait()
                    for step, path in self.saver.moved.items():
                        self.folder.fallback.moved[self.folder.checkpoint_dir.folder(step)] = path
            dist.barrier()  # everyone has sent its last report
            if self.collector:
                self.collector.take_all(self.store)
        log, peak = handlers.log, self.watch.peak()
        facts: dict[str, Any] = {
            "peak_live": log.peak_live,
            "peak_versions": log.peak_versions,
            "peak_bytes": peak.gpu_bytes or peak.host_bytes,
            "base_bytes": 0 if peak.gpu_bytes else self.base_bytes,
            "ends_s": self.ends_s,
            "moves": self.moves,
            "skipped": log.skipped,
            "spans": self.spans,
            "pending": self.folder.pending(),
        }
        if self.options.keeps_log:
            facts["events"] = [[type(e).__name__, *e] for e in log.events]
        others = self.state.renamed(final_buffers(handlers))
        if self.rank == 0:
            others = self.state.rest | others
            facts["names"] = {name: own for name, own in self.state.names.items() if own != name}
        return WorkerResult(final_weights(handlers), others, facts)

    @property
    def given_samples(self) -> int | None:
        """Of a microbatch, for another plan; any where the model is a chain, whose units are the same for all sizes."""
        return None if self.order.cut.way == "chain" else self.program.plan.feed.samples

    def found_bytes(self) -> int:
        """Returns the most memory that this worker has got so far: on its GPU, or beside its model."""
        device = device_of(self.program, self.rank)
        if device.type == "cuda":
            return torch.cuda.max_memory_reserved(device)
        return max(0, resident_bytes() - self.base_bytes)

    def _open_desk(self, stack: ExitStack, forecast: Prediction) -> None:
        """Lets the first rank take the reports of all, and show how the run gets on."""
        if self.rank:
            return
        is_counting_samples = self.batches.count(0) == self.program.sizes[0]
        forecast_s = forecast.chance.mean_s / self.program.plan.steps
        items = "samples" if is_counting_samples else "tokens"
        seats = [self._seat(worker, forecast.makespan_s) for worker in forecast.workers]
        self.progress = Progress(self.options.steps, items, forecast_s, self.start.step, seats)
        about = {"plan": self.program.plan.name, **self.program.plan.axes()}
        books = open_logbooks(self.folder, self.options, about, self.start.step, self._tell)
        self.pace = ThroughputMonitor(self.program)
        self.collector = MetricsCollector(
            self.folder,
            stack.enter_context(self.progress),
            stack.enter_context(books),
            num_ranks=len(self.program.workers),
            update_size=self.program.update_size,
            num_samples=sum(self.program.sizes),
            pace=self.pace,
        )
        if self.options.replan and len(seats) > 1:
            self.replanner = Replanner(self.pace, self._ask, self._turn)

    def _seat(self, worker: WorkerSummary, makespan_s: float) -> WorkerPanel:
        device = self.program.machine.device(worker.device)
        busy = worker.busy_s / makespan_s if makespan_s else None
        return WorkerPanel(f"{device.name} ({device.kind})", device.memory_bytes, worker.peak_bytes, busy)

    def _listen(self) -> None:
        """Looks now and then, beside training, whether the run is to stop, and on the first rank at its pace."""
        self.stop_signal.listen()
        if (stuck_s := self.folder.stuck_s()) > self.told_s + SLOW_S:
            self.told_s = stuck_s
            self._tell(f"the disk of {self.folder.path} has not answered for {stuck_s:.0f} s; training goes on")
        self.told_s = min(self.told_s, stuck_s)
        for straggler in self.pace.stragglers() if self.pace else ():
            self._tell(str(straggler))
            self.folder.add_metrics(
                {"straggler": straggler.worker, "lag": straggler.slowdown, "kinds": straggler.kinds}
            )
        if self.replanner:
            self.replanner.look()

    def _ask(self, slowdowns: Sequence[float]) -> PlanSwitch | None:
        """Asks the planner."""
        size = len(self.program.workers) if self.keeps_workers else None
        return find_switch(self.program, slowdowns, self.options.steps - self.step, self.given_samples, size)

    def _turn(self, switch: PlanSwitch) -> None:
        """Lets the run stop after a checkpoint, from which it goes on under another plan."""
        try:
            switch.save(self.folder.switch)
        except InputError as error:
            self._tell(f"{switch.reason}; the run keeps its plan, as the disk does not take the other one: {error}")
            return
        self._tell(switch.reason)
        self.stop_signal.asked.set()

    def _tell(self, sentence: str) -> None:
        self.progress.say(sentence)

    def before_round(self, handlers: Handlers) -> None:
        """Lets the watch follow the log, and the vigil the lanes."""
        handlers.notice = self.watchdog.notice
        self.watch.follow(handlers.log)

    def after_round(self, update: int, handlers: Handlers, spans: list[Span]) -> bool:
        """Keeps the round's spans, lets shares follow the measured rates, and saves; returns whether to go on."""
        self.spans, self.step = spans, update
        now_s = time.perf_counter()
        self.watch.settle(spans, RoundTimes(now_s - self.ends_s[-1], times_of(spans)) if self.ends_s else None)
        self.ends_s.append(now_s)  # the first round is warming up
        plan = self.program.plan
        if plan.feed.kind == "share" and plan.feed.is_controlled:
            self._rebalance(update, spans)
        self.is_stopped = self.stop_signal.is_due(update, plan.steps) and update < self.options.steps
        every, is_last = self.options.checkpoint_every, update >= self.options.steps or self.is_stopped
        is_saved = bool(self.saver and every and (update % every == 0 or is_last))
        if is_saved or is_last or self.replicas.is_due(update, plan.steps):
            self._check_replicas(update, handlers)
        if self.saver and is_saved:
            self._save(self.saver, update, handlers, is_last)
        return not self.is_stopped

    def _check_replicas(self, update: int, handlers: Handlers) -> None:
        """Raises WorkerError, on all ranks alike, if replicas that share every update hold different weights."""
        handlers.notice("net", "the comparison of replicas")
        sentence = self.replicas.find(update, [handlers], dist.all_reduce)
        handlers.notice("net", "")
        if sentence:
            if self.saver:
                self.saver.wait()
                dist.barrier()  # the checkpoint that was copied while they agreed is on the disk
            raise WorkerError(sentence)

    def _save(self, saver: Saver, update: int, handlers: Handlers, is_last: bool) -> None:
        """Copies this rank's share of the state, which the saver writes beside training."""
        is_apart = self.program.plan.feed.kind == "own"
        if is_apart:  # others may still be at an update before this one
            dist.barrier()
        tensors = take_state(handlers) | random_state(self.rank, handlers.device)
        if self.rank == 0:
            tensors = self.state.saved_rest() | tensors
        if is_apart:
            dist.barrier()
        self.watch.send()  # before the news that this part is written, so that the metrics have every step before it
        facts = {"norm": take_norm(handlers), "parts": self.program.parts, "fingerprints": self.start.fingerprints}
        settings, samples = Settings.of(self.options, self.program), self.order.samples(update)

        def about() -> dict[str, Any]:
            loss = self.collector.mean_loss(update) if self.collector else None
            return {"samples": samples, "loss": loss, **settings.in_manifest(facts)}

        saver.save(update, tensors, about, is_last=is_last)

    def _restore(self, checkpoint_dir: CheckpointDir, handlers: Handlers) -> None:
        """Puts the state of the checkpoint that the run goes on from in the place of the first weights."""
        if not self.start.step:
            return
        checkpoint = Checkpoint(checkpoint_dir.folder(self.start.step))
        facts, has = saved_in(checkpoint), checkpoint.manifest.tensors
        for name in [name for name in self.state.rest if f"buffer/{name}" in has]:
            self.state.rest[name] = checkpoint.tensor(f"buffer/{name}")
        put_state(
            handlers,
            self.start.step,
            lambda name: checkpoint.tensor(name) if name in has else None,
            facts.norm,
        )
        if self.program.plan.feed.is_controlled and [*map(len, facts.parts)] == [*map(len, self.program.parts)]:
            self._move(self.start.step, facts.parts)
        set_random_state(checkpoint, self.rank, handlers.device)

    def _rebalance(self, update: int, spans: list[Span]) -> None:
        """Moves samples between replicas from an update on; each keeps its number of microbatches."""
        plan, parts = self.program.plan, self.program.parts
        size = plan.pipeline_size
        pipelines = [range(c * size, (c + 1) * size) for c in range(plan.place.replicas)]
        pipelines += [range(w, w + 1) for w in range(len(pipelines) * size, plan.num_workers - plan.place.servers)]
        passes = (ActionKind.FORWARD, ActionKind.BACKWARD)
        busy = [s.end_s for s in spans if s.lane == "compute" and s.action.startswith(passes)]
        ends = [max(busy, default=0.0) if self.rank in pipeline else 0.0 for pipeline in pipelines]
        times = torch.tensor(ends, dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        counts = [sum(part) for part in parts]
        bounds = [(len(part), len(part) * plan.feed.samples) for part in parts]
        following = adjusted_counts(counts, times.tolist(), bounds)
        if following != tuple(counts):
            self._move(update, tuple(cut_evenly(n, len(part)) for n, part in zip(following, parts, strict=True)))
            if self.rank == 0:
                self.folder.add_metrics({"shares": [count / sum(following) for count in following]})

    def _move(self, update: int, parts: tuple[tuple[int, ...], ...]) -> None:
        """Gives replicas other parts of a batch from an update on."""
        self.program = replace(self.program, parts=parts)
        self.order.change(update, self.program.sizes)
        self.moves.append((update, parts))
        if self.pace:
            self.pace.expect(self.program)
