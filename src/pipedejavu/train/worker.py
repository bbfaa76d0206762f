"""One rank of a training run: runs its worker of the program, reports on the way, and packs what it leaves."""

import math
import os
import signal
import sys
from contextlib import ExitStack
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
from pipedejavu.program import compile as compile_plan
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


class Rank:
    """One rank's state during a run; the first has the run folder, the others need none."""

    def __init__(self, options: TrainOptions, program: Program, store: Store, folder: RunFolder):
        self.options, self.program, self.store, self.folder = options, program, store, folder
        self.rank = dist.get_rank()
        torch.set_num_threads(num_threads(program.machine, program.devices, self.rank))
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic
        torch.use_deterministic_algorithms(True, warn_only=True)
        self.job, batches = prepare(options, program.plan.feed.samples)
        self.batches = SteadyBatches(batches)
        self.spans: list[Span] = []

    def run(self, shared: Path) -> Part:
        """Trains to the end; `shared` is a folder for weights that the workers of one host share."""
        rounds = math.ceil(self.options.steps / self.program.plan.steps)
        with ExitStack() as stack:
            desk = self._open_desk(stack) if self.rank == 0 else None
            self.watch = Watch(self.store, self.rank, self.batches, device_of(self.program, self.rank), desk)
            with self.watch:
                handlers = run_rank(
                    self.program, self.job, self.batches, rounds, self.after_round, shared, self.before_round
                )
            dist.barrier()  # everyone has sent its last report
            if desk:
                desk.take_all(self.store)
        log, peak = handlers.log, self.watch.peak()
        facts: dict[str, Any] = {
            "peak_live": log.peak_live,
            "peak_versions": log.peak_versions,
            "peak_bytes": peak.gpu_bytes or peak.host_bytes,
            "shares": self.program.plan.feed.shares,
        }
        if self.options.keeps_log:
            facts["events"] = [[type(e).__name__, *e] for e in log.events]
        return Part.of(final_weights(handlers), self.spans, facts)

    def _open_desk(self, stack: ExitStack) -> Desk:
        is_counting_samples = self.batches.count(0) == self.program.plan.feed.samples
        progress = Progress(self.options.steps, "samples" if is_counting_samples else "tokens")
        ranks = len(self.program.workers)
        return Desk(self.folder, stack.enter_context(progress), ranks, self.program.update_size)

    def before_round(self, handlers: Handlers) -> None:
        """Lets the watch follow the log."""
        self.watch.follow(handlers.log)

    def after_round(self, number: int, handlers: Handlers, spans: list[Span]) -> Program:  # noqa: ARG002
        """Keeps the round's spans, and returns the program of the next round."""
        self.spans = spans
        self.watch.settle()
        return self._rebalanced(spans)

    def _rebalanced(self, spans: list[Span]) -> Program:
        """Returns the next round's program: the same, or one with shares that follow the measured rates."""
        plan = self.program.plan
        if plan.feed.kind != "share" or not plan.feed.is_controlled or plan.feed.shares is None:
            return self.program
        size = plan.pipeline_size
        crews = [range(c * size, (c + 1) * size) for c in range(plan.place.replicas)]
        crews += [range(w, w + 1) for w in range(len(crews) * size, plan.num_workers - plan.place.servers)]
        busy = [s.end_s for s in spans if s.lane == "compute" and s.action[0] in "FB"]
        ends = [max(busy, default=0.0) if self.rank in crew else 0.0 for crew in crews]
        times = torch.tensor(ends, dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        counts = [round(share * plan.feed.microbatches) for share in plan.feed.shares]
        following = adjusted_counts(counts, times.tolist())
        if following != tuple(counts):
            shares = tuple(count / plan.feed.microbatches for count in following)
            self.program = with_shares(self.program, shares)
            if self.rank == 0:
                self.folder.add_metrics({"shares": shares})
        return self.program


def with_shares(program: Program, shares: tuple[float, ...]) -> Program:
    """Returns the program of the same plan with other shares."""
    plan = program.plan
    changed = plan.but(feed=plan.feed.but(shares=shares), decisions=())
    return compile_plan(changed, program.profile, program.machine, fold=False)
