"""One rank of a training run: runs its worker of the program, reports metrics, saves, and packs its result."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from pipedejavu.analysis.mapped_memory import mapped_bytes
from pipedejavu.engine.device import device_of
from pipedejavu.engine.engine_state import check_state, final_buffers
from pipedejavu.engine.handlers import Handlers
from pipedejavu.engine.rank_process import RankRound
from pipedejavu.engine.replicas import ReplicaCheck
from pipedejavu.engine.share_control import adjusted_counts
from pipedejavu.engine.threads import final_weights
from pipedejavu.facts import InputError, Span, WorkerSummary
from pipedejavu.facts.start_phase import START
from pipedejavu.health.failure import ShortageError, WorkerError, is_shortage
from pipedejavu.health.watchdog import HangWatchdog
from pipedejavu.launch.handover import RunForecast
from pipedejavu.launch.membership import AllRanks, Members, describe_left, members_of
from pipedejavu.launch.rank_evaluation import RankEvaluation
from pipedejavu.launch.rank_monitor import RankMonitor
from pipedejavu.launch.worker_process import WorkerLaunch, WorkerProcess, set_up_process
from pipedejavu.one_device import start_rank
from pipedejavu.planner.replan import PlanSwitch, Replanner, find_switch
from pipedejavu.probe.machine_shape import num_cores
from pipedejavu.program import ActionKind, Program
from pipedejavu.program.share import cut_evenly
from pipedejavu.run.live_view import WorkerPanel
from pipedejavu.run.logbook import open_logbooks
from pipedejavu.run.metrics import ManifestFields, MetricsCollector, MetricsReporter, resident_bytes
from pipedejavu.run.options import TrainOptions
from pipedejavu.run.progress import Progress
from pipedejavu.run.run_folder import RunFolder, RunStart
from pipedejavu.run.saved_facts import saved_in
from pipedejavu.run.settings import Settings
from pipedejavu.run.stop_signal import STOPPED, StopSignal
from pipedejavu.run.throughput import RoundTimes, ThroughputMonitor, times_of
from pipedejavu.run.whole_state import WholeState
from pipedejavu.run.worker_result import WorkerResult
from pipedejavu.session.training_session import RankWorker, TrainingSession
from pipedejavu.source.host_threads import HostThreads
from pipedejavu.source.read_ahead import ReadAhead
from pipedejavu.source.resident_batches import ResidentBatches
from pipedejavu.source.task import Prepared, SteadyBatches, num_kept, prepare
from pipedejavu.store import Checkpoint, CheckpointDir, Saver


def work(rank: int, size: int, launched: WorkerLaunch) -> None:
    """Runs a rank of a training run in a process of its own."""
    with WorkerProcess(rank, size, launched) as process:
        folder, (program, forecast), store = process.folder, process.handover, process.store
        assert forecast is not None
        start, watchdog, members = folder.start(), process.watchdog, members_of(store, rank, program)
        run = Rank(folder.options(), program, store, folder, start, watchdog, forecast, members=members)
        process.result = run.run(folder.checkpoint_dir).pack()
        process.code = STOPPED if run.is_stopped else 0


Move = tuple[int, tuple[tuple[int, ...], ...]]
"""An update, and the sizes of each replica's microbatches from that update on."""


class Rank:
    """One rank of a run, with its measurements. Only the lead of its members needs the run folder."""

    def __init__(
        self,
        options: TrainOptions,
        program: Program,
        store: Store,
        folder: RunFolder,
        start: RunStart,
        watchdog: HangWatchdog,
        forecast: RunForecast,
        prepared: Prepared | None = None,
        *,
        keeps_workers: bool = False,
        members: Members | None = None,
    ):
        """With `keeps_workers` the run switches only to plans with as many workers as this one.

        Builds the model, unless it is `prepared`.
        """
        self.options, self.program, self.store, self.folder, self.start = options, program, store, folder, start
        self.watchdog, self.forecast, self.keeps_workers = watchdog, forecast, keeps_workers
        self.rank, self.members = dist.get_rank(), members or AllRanks()
        self.is_lead = self.rank == self.members.lead
        if options.keeps_log:  # the audit replays without TF32, which cuDNN uses for float32 by default
            torch.backends.cudnn.allow_tf32 = False
        set_up_process(program, self.rank, is_deterministic=options.deterministic)
        first = options.replace(weights=None) if start.step else options  # a checkpoint has the weights
        self.job, self.order = prepared or prepare(first, program.sizes, program.plan.cut.begins)
        self.state = WholeState(self.order.task.model, self.job.units)
        self.order.start(start.step, start.samples)
        self.host_threads = HostThreads(program, self.rank, self.order.task.data, num_cores())
        self.evaluation = RankEvaluation(options, program, self.order) if options.has_evaluation else None
        self.paused_s = 0.0
        """Time that evaluations have taken."""
        kept = num_kept(program, self.rank)
        self.read_ahead: ReadAhead | None = None
        """Reads each microbatch ahead if this worker reads all of them, once and in order."""
        resident = ResidentBatches(self.order, program, self.rank) if options.data_on == "device" else None
        if len(program.workers) == 1 and kept == 1 and resident is None:
            pins = device_of(program, 0).type == "cuda"
            self.read_ahead = ReadAhead(self.order, options.steps * program.update_size, pins=pins)
        self.order.keep(kept + 1)
        self.batches = SteadyBatches(resident or self.read_ahead or self.order)
        self.replicas = ReplicaCheck(program, self.job, options.check_replicas, start.step)
        self.moves: list[Move] = []
        self.spans: list[Span] = []
        self.step, self.is_stopped, self.base_bytes = start.step, False, resident_bytes()
        self.ends_s: list[float] = []
        """When each round ended."""
        halts, lead = PrefixStore("halt", store), self.members.lead
        self.stop_signal = StopSignal(halts, self.rank, len(program.workers), lead, self.members.is_dead)
        self.stop_signal.obey()
        self.collector: MetricsCollector | None = None
        self.throughput: ThroughputMonitor | None = None
        self.replanner: Replanner | None = None
        self.saver: Saver | None = None

    def run(self, checkpoint_dir: CheckpointDir) -> WorkerResult:
        """Trains to the end, with checkpoints in a folder that all ranks see."""
        try:
            return self._run(checkpoint_dir)
        except BaseException as error:
            if is_shortage(error):
                raise ShortageError(self.rank, self.obtained_bytes()) from error
            raise
        finally:
            if self.read_ahead:
                self.read_ahead.close()

    def _run(self, checkpoint_dir: CheckpointDir) -> WorkerResult:
        self.watchdog.allow(self.forecast.makespan_s / self.program.plan.steps, self.options.hang_after_s)
        with ExitStack() as stack:
            if self.is_lead:
                self._open_metrics(stack)
            if self.options.checkpoint_every:
                store = (PrefixStore("saver", self.store), len(self.program.workers))
                self.saver = Saver(
                    checkpoint_dir, rank=self.rank, store=store, tell=self._tell, note=self.folder.add_metrics,
                    fallback=self.folder.fallback.folder, lead=self.members.lead, is_dead=self.members.is_dead,
                )  # fmt: skip
            device = device_of(self.program, self.rank)
            self.reporter = MetricsReporter(self.store, self.rank, self.batches, device, self.collector)
            monitor = RankMonitor(
                self.stop_signal, self.folder, self._tell, self.throughput, self.replanner, self.collector,
                partial(self.members.departures, self.options.steps),
            )  # fmt: skip
            with self.reporter, monitor:
                try:
                    handlers = self._train(checkpoint_dir)
                except Exception as error:  # a checkpoint holds finite state, and the run can go on from it
                    is_alone = len(self.program.workers) == 1
                    if self.saver and (isinstance(error, InputError) or (is_alone and is_shortage(error))):
                        self.saver.finish()  # reports are still taken, so the metrics have its steps
                    raise
                if self.saver:
                    self.saver.wait()
                    for step, path in self.saver.moved.items():
                        self.folder.fallback.moved[self.folder.checkpoint_dir.folder(step)] = path
            self.members.close(self.step)  # all ranks have sent their last report
            monitor.check_members()
            if self.collector:
                self.collector.take_all(self.store)
        return self._result(handlers)

    def _train(self, checkpoint_dir: CheckpointDir) -> Handlers:
        """Runs all rounds of this rank's worker; returns its state at the end."""
        with START.phase("workers"):
            rank = start_rank(self.program, self.job, self.batches)
            self.members.follow(rank)
            self._begin(checkpoint_dir, rank.handlers)
        if self.is_lead and (wires := rank.wire.describe()):
            said = str(mapped_bytes(self.program))
            self.progress.note(f"wires: {wires}" + (f"; {said}" if said else ""))
        rank.handlers.notice = self.watchdog.notice
        self.reporter.follow(rank.handlers.log)
        rounds = rank.rounds(range(self.start.step, self.options.steps, self.program.plan.steps), self.members.open)
        for update, spans in self._first_timed(rounds):
            if not self.after_round(update, rank.handlers, spans):
                break
        check_state(rank.handlers)  # the result must be finite even if nothing was saved
        rank.handlers.gather_masters()
        rank.wire.close()
        return rank.handlers

    def _first_timed(self, rounds: Iterator[RankRound]) -> Iterator[RankRound]:
        """Yields rounds; after the first it notes the time from the command to the end of that round."""
        with START.phase("first update"):
            first = next(rounds, None)
        if first is None:
            return
        if self.is_lead and not START.is_over:
            self.folder.add_metrics({"start": START.of_process()})
            self.progress.note(str(START))
        START.is_over = True
        yield first
        yield from rounds

    def _result(self, handlers: Handlers) -> WorkerResult:
        """Returns the weights of this rank's worker, and what it has measured."""
        log, peak = handlers.log, self.reporter.peak()
        facts: dict[str, Any] = {
            "peak_live": log.peak_live,
            "peak_versions": log.peak_versions,
            "peak_bytes": peak.gpu_bytes or peak.host_bytes,
            "base_bytes": 0 if peak.gpu_bytes else self.base_bytes,
            "ends_s": self.ends_s,
            "moves": self.moves,
            "skipped": log.skipped,
            "left": log.left,
            "spans": self.spans,
            "pending": self.folder.pending(),
        }
        if self.options.keeps_log:
            facts["events"] = [[type(e).__name__, *e] for e in log.events]
        others = self.state.renamed(final_buffers(handlers))
        if self.is_lead:
            others = self.state.rest | others
            facts["names"] = {unit: name for unit, name in self.state.names.items() if name != unit}
        return WorkerResult(final_weights(handlers), others, facts)

    @property
    def microbatch_samples(self) -> int | None:
        """Samples per microbatch that another plan must keep; None for a chain, which is cut alike for any size."""
        return None if self.order.cut.method == "chain" else self.program.plan.feed.samples

    def obtained_bytes(self) -> int:
        """Returns the most memory that this worker has had: reserved on its GPU, or on the host without its model."""
        device = device_of(self.program, self.rank)
        if device.type == "cuda":
            return torch.cuda.max_memory_reserved(device)
        return max(0, resident_bytes() - self.base_bytes)

    def _open_metrics(self, stack: ExitStack) -> None:
        """Starts collecting the metrics of all ranks, and shows the progress of the run."""
        is_counting_samples = self.batches.count(0) == self.program.sizes[0]
        forecast_s = self.forecast.mean_s / self.program.plan.steps
        items = "samples" if is_counting_samples else "tokens"
        panels = [self._panel(worker, self.forecast.makespan_s) for worker in self.forecast.workers]
        self.progress = Progress(self.options.steps, items, forecast_s, self.start.step, panels)
        about = {"plan": self.program.plan.name, **self.program.plan.axes()}
        logbooks = open_logbooks(self.folder, self.options, about, self.start.step, self._tell)
        self.throughput = ThroughputMonitor(self.program)
        self.collector = MetricsCollector(
            self.folder,
            stack.enter_context(self.progress),
            stack.enter_context(logbooks),
            num_ranks=len(self.program.workers),
            update_size=self.program.update_size,
            num_samples=sum(self.program.sizes),
            throughput=self.throughput,
        )
        if self.options.replan and len(panels) > 1:
            self.replanner = Replanner(self.throughput, self._find_switch, self._request_switch)

    def _panel(self, worker: WorkerSummary, makespan_s: float) -> WorkerPanel:
        device = self.program.machine.device(worker.device)
        busy = worker.busy_s / makespan_s if makespan_s else None
        return WorkerPanel(f"{device.name} ({device.kind})", device.memory_bytes, worker.peak_bytes, busy)

    def _find_switch(self, slowdowns: Sequence[float]) -> PlanSwitch | None:
        """Searches for a plan that pays, given how much slower than forecast each worker is."""
        size = len(self.program.workers) if self.keeps_workers else None
        return find_switch(self.program, slowdowns, self.options.steps - self.step, self.microbatch_samples, size)

    def _request_switch(self, switch: PlanSwitch) -> None:
        """Stops the run after its next checkpoint, from which it goes on under the other plan."""
        try:
            switch.save(self.folder.switch)
        except InputError as error:
            self._tell(f"{switch.reason}; the run keeps its plan, as the disk does not take the other one: {error}")
            return
        self._tell(switch.reason)
        self.stop_signal.asked.set()

    def _tell(self, sentence: str) -> None:
        self.progress.say(sentence)

    def after_round(self, update: int, handlers: Handlers, spans: list[Span]) -> bool:
        """Keeps the round's spans, rebalances shares by measured rates, and saves; returns whether to go on."""
        self.spans, self.step = spans or self.spans, update
        now_s = time.perf_counter() - self.paused_s
        has_times = self.ends_s and spans
        self.reporter.settle(spans, RoundTimes(now_s - self.ends_s[-1], times_of(spans)) if has_times else None)
        self.ends_s.append(now_s)  # the first round is a warm-up
        plan = self.program.plan
        if plan.feed.kind == "share" and plan.feed.is_controlled:
            self._rebalance(update, spans)
        self.is_stopped = self.stop_signal.is_due(update, plan.steps) and update < self.options.steps
        every, is_last = self.options.checkpoint_every, update >= self.options.steps or self.is_stopped
        is_saved = bool(self.saver and every and (update % every == 0 or is_last))
        if is_saved or is_last or self.replicas.is_due(update, plan.steps):
            self._check_replicas(update, handlers)
        if self.evaluation and not self.is_stopped and self.evaluation.is_due(update):
            self._evaluate(self.evaluation, update, handlers)
        if self.saver and is_saved:
            self._save(self.saver, update, is_last)
        return not self.is_stopped

    def _evaluate(self, evaluation: RankEvaluation, update: int, handlers: Handlers) -> None:
        """Evaluates on all ranks, and adds the figures to the metrics."""
        started_s = time.perf_counter()
        if self.program.plan.feed.is_own:  # other replicas may still be at an earlier update
            self.members.meet(update)
        evaluated = evaluation.run(update, handlers, self.session.workers.add_up)
        took_s = time.perf_counter() - started_s
        self.paused_s += took_s
        if self.collector:
            about = {"evaluated": update, "epoch": evaluated.epoch, "count": evaluated.result.num_items}
            at_s = time.perf_counter() - self.reporter.started_s
            self.collector.add_evaluation(about, evaluated.result.figures(), at_s, took_s)

    def _check_replicas(self, update: int, handlers: Handlers) -> None:
        """Raises WorkerError, on all ranks, if replicas that share every update hold different weights."""
        handlers.notice("net", "the comparison of replicas")
        sentence = self.session.compare_replicas(update)
        handlers.notice("net", "")
        if sentence:
            if self.saver:
                self.saver.wait()
                dist.barrier()  # the checkpoint that was copied while replicas agreed is on the disk
            raise WorkerError(sentence)

    def _save(self, saver: Saver, update: int, is_last: bool) -> None:
        """Copies this rank's share of the state; the saver writes it in the background."""
        is_apart = self.program.plan.feed.is_own
        if is_apart:  # other replicas may still be at an earlier update
            self.members.meet(update)
        absent = self.members.dead
        tensors = self.session.take_state()
        if is_apart:
            self.members.meet(update)
        self.reporter.send()  # before this shard counts as written, so that the metrics have every step before it
        facts = {
            "norm": self.session.take_norm(), "parts": self.program.parts, "fingerprints": self.start.fingerprints,
        }  # fmt: skip
        fields = Settings.of(self.options, self.program).in_manifest(facts | self.members.facts())
        about = ManifestFields(update, self.order.samples(update), fields, self.collector)
        saver.save(update, tensors, about, is_last=is_last, absent=absent)

    def _begin(self, checkpoint_dir: CheckpointDir, handlers: Handlers) -> None:
        """Opens the session of this rank's worker, and restores the checkpoint that the run goes on from."""
        worker = RankWorker(self.rank, handlers, lead=self.members.lead, add_up=self.members.add_up)
        self.session = TrainingSession(worker, self.replicas, self.state)
        if not self.start.step:
            return
        checkpoint = Checkpoint(checkpoint_dir.folder(self.start.step))
        saved, facts = checkpoint.manifest.tensors, saved_in(checkpoint)
        for name in [name for name in self.state.rest if f"buffer/{name}" in saved]:
            self.state.rest[name] = checkpoint.tensor(f"buffer/{name}")
        self.session.restore(checkpoint)
        if self.program.plan.feed.is_controlled and [*map(len, facts.parts)] == [*map(len, self.program.parts)]:
            self._move(self.start.step, facts.parts)
        if facts.left and self.is_lead:
            self.progress.note(describe_left(facts.left))

    def _rebalance(self, update: int, spans: list[Span]) -> None:
        """Moves samples between replicas from an update on; each keeps its number of microbatches."""
        plan, parts = self.program.plan, self.program.parts
        size = plan.pipeline_size
        pipelines = [range(c * size, (c + 1) * size) for c in range(plan.place.replicas)]
        pipelines += [range(w, w + 1) for w in range(len(pipelines) * size, plan.num_workers - plan.place.servers)]
        passes = (ActionKind.FORWARD, ActionKind.BACKWARD)
        busy = [s.end_s for s in spans if s.lane == "compute" and s.action.startswith(passes)]
        ends = [max(busy, default=0.0) if self.rank in pipeline else 0.0 for pipeline in pipelines]
        stages = self.host_threads.times(spans) if self.host_threads.is_followed else []
        measured = torch.tensor([*ends, *stages], dtype=torch.float64)
        dist.all_reduce(measured, dist.ReduceOp.MAX)
        times, stage_times = measured[: len(ends)], measured[len(ends) :]
        table = self.host_threads.follow(stage_times.tolist()) if stages else ""
        if table and self.rank == 0:
            self.folder.add_metrics({"threads": table})
        counts = [sum(part) for part in parts]
        bounds = [(len(part), len(part) * plan.feed.samples) for part in parts]
        following = adjusted_counts(counts, times.tolist(), bounds)
        if following != tuple(counts):
            self._move(update, tuple(cut_evenly(n, len(part)) for n, part in zip(following, parts, strict=True)))
            if self.rank == 0:
                self.folder.add_metrics({"shares": [count / sum(following) for count in following]})

    def _move(self, update: int, parts: tuple[tuple[int, ...], ...]) -> None:
        """Gives the replicas microbatches of other sizes from an update on."""
        self.program = replace(self.program, parts=parts)
        self.order.change(update, self.program.sizes)
        self.moves.append((update, parts))
        if self.throughput:
            self.throughput.expect(self.program)
