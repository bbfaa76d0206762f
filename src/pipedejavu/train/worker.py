"""One rank of a training run: runs its worker of the program, reports on the way, and packs what it leaves."""

import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store

from pipedejavu.engine.device import device_of
from pipedejavu.engine.handle import Handlers
from pipedejavu.engine.process import run_rank
from pipedejavu.engine.run import final_weights
from pipedejavu.engine.share import adjusted_counts
from pipedejavu.facts import Span
from pipedejavu.program import Program
from pipedejavu.program.share import cut_evenly
from pipedejavu.train.failure import write_failure
from pipedejavu.train.folder import Part, RunFolder
from pipedejavu.train.options import TrainOptions
from pipedejavu.train.progress import Progress
from pipedejavu.train.site import num_threads
from pipedejavu.train.task import SteadyBatches, prepare
from pipedejavu.train.watch import Desk, Watch


def work(rank: int, size: int, path: str) -> None:
    """Runs a rank that this project started itself: stores in the run folder, sockets on loopback only."""
    # Whoever started it ends it, at once, wherever it waits.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    folder, code = RunFolder(path), 1
    try:
        dist.init_process_group("gloo", store=FileStore(str(folder.parts / "group"), size), rank=rank, world_size=size)
        run = Rank(folder.options(), folder.program(), FileStore(str(folder.parts / "watch"), size), folder)
        folder.write_part(rank, run.run(folder.parts))
        code = 0
    except BaseException as error:
        write_failure(folder.failure, rank, error)
    # What this rank has to say is on disk. Ending here spares the interpreter's shutdown, which waits for lanes that
    # wait for others, and now and then aborts a process whose C++ threads are still about.
    sys.stderr.flush()
    os._exit(code)


Move = tuple[int, tuple[tuple[int, ...], ...]]
"""An update, and the parts that the replicas of a program have from it on."""


class Rank:
    """One rank's state during a run; the first has the run folder, the others need none."""

    def __init__(self, options: TrainOptions, program: Program, store: Store, folder: RunFolder):
        self.options, self.program, self.store, self.folder = options, program, store, folder
        self.rank = dist.get_rank()
        torch.set_num_threads(num_threads(program.machine, program.devices, self.rank))
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic
        torch.use_deterministic_algorithms(True, warn_only=True)
        self.job, self.order = prepare(options, program.sizes)
        self.batches = SteadyBatches(self.order)
        self.moves: list[Move] = []
        self.spans: list[Span] = []

    def run(self, shared: Path) -> Part:
        """Trains to the end; `shared` is a folder for weights that the workers of one host share."""
        updates = range(0, self.options.steps, self.program.plan.steps)
        with ExitStack() as stack:
            desk = self._open_desk(stack) if self.rank == 0 else None
            self.watch = Watch(self.store, self.rank, self.batches, device_of(self.program, self.rank), desk)
            with self.watch:
                handlers = run_rank(
                    self.program, self.job, self.batches, updates, self.after_round, shared, self.before_round
                )
            dist.barrier()  # everyone has sent its last report
            if desk:
                desk.take_all(self.store)
        log, peak = handlers.log, self.watch.peak()
        facts: dict[str, Any] = {
            "peak_live": log.peak_live,
            "peak_versions": log.peak_versions,
            "peak_bytes": peak.gpu_bytes or peak.host_bytes,
            "moves": self.moves,
        }
        if self.options.keeps_log:
            facts["events"] = [[type(e).__name__, *e] for e in log.events]
        return Part.of(final_weights(handlers), self.spans, facts)

    def _open_desk(self, stack: ExitStack) -> Desk:
        is_counting_samples = self.batches.count(0) == self.program.sizes[0]
        progress = Progress(self.options.steps, "samples" if is_counting_samples else "tokens")
        ranks = len(self.program.workers)
        return Desk(self.folder, stack.enter_context(progress), ranks, self.program.update_size)

    def before_round(self, handlers: Handlers) -> None:
        """Lets the watch follow the log."""
        self.watch.follow(handlers.log)

    def after_round(self, update: int, handlers: Handlers, spans: list[Span]) -> bool:  # noqa: ARG002
        """Keeps the round's spans, and lets shares follow the measured rates."""
        self.spans = spans
        self.watch.settle()
        feed = self.program.plan.feed
        if feed.kind == "share" and feed.is_controlled:
            self._rebalance(update, spans)
        return True

    def _rebalance(self, update: int, spans: list[Span]) -> None:
        """Moves samples between replicas from an update on; each keeps its number of microbatches."""
        plan, parts = self.program.plan, self.program.parts
        size = plan.pipeline_size
        crews = [range(c * size, (c + 1) * size) for c in range(plan.place.replicas)]
        crews += [range(w, w + 1) for w in range(len(crews) * size, plan.num_workers - plan.place.servers)]
        busy = [s.end_s for s in spans if s.lane == "compute" and s.action[0] in "FB"]
        ends = [max(busy, default=0.0) if self.rank in crew else 0.0 for crew in crews]
        times = torch.tensor(ends, dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        counts = [sum(part) for part in parts]
        bounds = [(len(part), len(part) * plan.feed.samples) for part in parts]
        following = adjusted_counts(counts, times.tolist(), bounds)
        if following != tuple(counts):
            parts = tuple(cut_evenly(count, len(part)) for count, part in zip(following, parts, strict=True))
            self.program = replace(self.program, parts=parts)
            self.order.change(update, self.program.sizes)
            self.moves.append((update, parts))
            if self.rank == 0:
                self.folder.add_metrics({"shares": [count / sum(following) for count in following]})
