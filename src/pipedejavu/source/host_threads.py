"""The threads of a host that loads a graph: divided between the loaders of all workers and the trainers on CPUs.

Every worker holds the same table and computes the same moves from times that all of them know, so nothing but the times
is exchanged. Other data, and plans on several hosts, keep the threads that they began with.
"""

from collections.abc import Sequence

import torch

from pipedejavu.engine.device import device_of
from pipedejavu.engine.thread_control import adjusted_threads
from pipedejavu.facts import Span
from pipedejavu.program import Program
from pipedejavu.program.share import cut_evenly
from pipedejavu.zoo import Dataset
from pipedejavu.zoo.graph_sample import GraphSamples


class HostThreads:
    """One worker's view of the table."""

    def __init__(self, program: Program, rank: int, data: Dataset, num_cores: int):
        self.rank, self.data = rank, data
        workers = [n for n, part in enumerate(program.parts) if part]
        trainers = [n for n in workers if program.machine.device(program.devices[n]).type == "cpu"]
        self.stages = [*(("loader", n) for n in workers), *(("trainer", n) for n in trainers)]
        self.threads = cut_evenly(num_cores, len(self.stages))
        hosts = {program.machine.device(name).host for name in program.devices}
        plan = program.plan
        is_whole = plan.pipeline_size == 1 and not plan.place.servers
        self.is_followed = (
            plan.feed.is_controlled and isinstance(data, GraphSamples) and len(hosts) == 1 and is_whole
        ) and len(self.stages) <= num_cores
        self._busy_s = 0.0
        if isinstance(data, GraphSamples) and device_of(program, rank).type == "cuda":
            data.pins, data.num_threads = True, max(1, num_cores // 2)
        if self.is_followed:
            self._apply()

    def times(self, spans: Sequence[Span]) -> list[float]:
        """Returns how long each stage of this worker was busy in a round, 0 for the stages of others."""
        assert isinstance(self.data, GraphSamples)
        loading, self._busy_s = self.data.busy_s - self._busy_s, self.data.busy_s
        training = sum(s.end_s - s.start_s for s in spans if s.lane == "compute")
        busy = {("loader", self.rank): loading, ("trainer", self.rank): training}
        return [busy.get(stage, 0.0) for stage in self.stages]

    def follow(self, times_s: Sequence[float]) -> str:
        """Moves a thread if that pays, given the times of all stages; returns the new table as text, or ''."""
        following = adjusted_threads(self.threads, times_s)
        if following == self.threads:
            return ""
        self.threads = following
        self._apply()
        return ", ".join(f"{name} of worker {n} {c}" for (name, n), c in zip(self.stages, following, strict=True))

    def _apply(self) -> None:
        """Gives this worker's stages their threads; torch's are those of the calling thread, which trains."""
        assert isinstance(self.data, GraphSamples)
        mine = {name: count for (name, n), count in zip(self.stages, self.threads, strict=True) if n == self.rank}
        self.data.num_threads = mine.get("loader", 1)
        if "trainer" in mine:
            torch.set_num_threads(mine["trainer"])
