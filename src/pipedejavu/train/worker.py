"""One rank of a training run: opens the run folder, runs its worker of the program, and writes its part."""

import math
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from pipedejavu.engine.handle import Handlers
from pipedejavu.engine.process import run_rank
from pipedejavu.engine.run import final_weights
from pipedejavu.engine.share import adjusted_counts
from pipedejavu.facts import InputError, Span
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.train.folder import RunFolder
from pipedejavu.train.progress import Progress
from pipedejavu.train.task import SampleOrder, make_job, make_task


def work(rank: int, size: int, path: str) -> None:
    """Runs a rank that this project started itself: a store in the run folder, sockets on loopback only."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = FileStore(str(Path(path) / "parts" / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        Rank(path).run()
    except InputError as error:
        RunFolder(path).write_reason(str(error))
        raise
    # This rank's part is on disk. Ending here spares the interpreter's shutdown, which now and then aborts a process
    # whose C++ threads are still about ("terminate called without an active exception").
    sys.stderr.flush()
    os._exit(0)


class Rank:
    """One rank's state during a run."""

    def __init__(self, path: str):
        self.folder = RunFolder(path)
        self.options, self.program = self.folder.options(), self.folder.program()
        torch.set_num_threads(self.options.num_threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        task = make_task(self.options)
        self.job = make_job(task, self.options)
        self.batches = SampleOrder(task.data, task, self.program.plan.feed.samples, self.options.seed)
        self.is_first = dist.get_rank() == 0
        self.spans: list[Span] = []
        self.started_s = time.perf_counter()

    def run(self) -> None:
        """Trains to the end and writes this rank's part."""
        plan = self.program.plan
        rounds = math.ceil(self.options.steps / plan.steps)
        with Progress(self.options.steps, is_shown=self.is_first) as progress:
            self.progress = progress
            handlers = run_rank(self.program, self.job, self.batches, rounds, self.after_round, self.folder.parts)
        weights, log = final_weights(handlers), handlers.log
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        facts: dict[str, Any] = {"peak_live": log.peak_live, "peak_versions": log.peak_versions, "peak_bytes": peak}
        if self.options.keeps_log:
            facts["events"] = [[type(e).__name__, *e] for e in log.events]
        self.folder.write_part(dist.get_rank(), weights, self.spans, facts)

    def after_round(self, number: int, handlers: Handlers, spans: list[Span]) -> Program:
        """Adds up the round's loss over all ranks, reports it, and returns the program of the next round."""
        self.spans = spans
        steps, size = self.program.plan.steps, self.program.update_size
        totals = torch.zeros(steps, 2, dtype=torch.float64)  # of each update: summed loss, and what it sums over
        for microbatch, loss in handlers.log.losses.items():
            row = totals[microbatch // size - number * steps]
            row += torch.tensor([loss, self.batches.count(microbatch)], dtype=torch.float64)
        dist.all_reduce(totals)
        handlers.log.losses.clear()
        if self.is_first:
            elapsed = time.perf_counter() - self.started_s
            for n, (loss, count) in enumerate(totals.tolist()):
                step = number * steps + n + 1
                self.folder.add_metrics({"step": step, "loss": loss / count, "count": int(count), "elapsed_s": elapsed})
                self.progress.report(step, loss / count, int(count))
        return self._rebalanced(spans)

    def _rebalanced(self, spans: list[Span]) -> Program:
        """Returns the next round's program: the same, or one with shares that follow the measured rates."""
        plan = self.program.plan
        if plan.feed.kind != "share" or not plan.feed.is_controlled or plan.feed.shares is None:
            return self.program
        size = plan.pipeline_size
        crews = [range(c * size, (c + 1) * size) for c in range(plan.place.replicas)]
        crews += [range(w, w + 1) for w in range(len(crews) * size, plan.num_workers - plan.place.servers)]
        rank = dist.get_rank()
        busy = [s.end_s for s in spans if s.lane == "compute" and s.action[0] in "FB"]
        times = torch.tensor([max(busy, default=0.0) if rank in crew else 0.0 for crew in crews], dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        counts = [round(share * plan.feed.microbatches) for share in plan.feed.shares]
        following = adjusted_counts(counts, times.tolist())
        if following != tuple(counts):
            shares = tuple(count / plan.feed.microbatches for count in following)
            changed = plan.but(feed=plan.feed.but(shares=shares), decisions=())
            self.program = compile_plan(changed, self.program.profile, self.program.machine, fold=False)
            if self.is_first:
                self.folder.add_metrics({"shares": shares})
        return self.program
