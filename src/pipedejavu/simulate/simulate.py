"""`simulate`: predicts when each action of a program runs, and its memory over time."""

from dataclasses import dataclass
from functools import cached_property

from pipedejavu.analysis import Graph, build_graph
from pipedejavu.analysis.liveness import Liveness, Stay, count_versions
from pipedejavu.analysis.verify import peak_bytes
from pipedejavu.facts import Timeline, WorkerSummary, paused_collector
from pipedejavu.program import Program
from pipedejavu.program.action import FORWARD, GRADIENT_KINDS
from pipedejavu.simulate.action_cost import ActionCosts
from pipedejavu.simulate.allocator import Footprint
from pipedejavu.simulate.chance import Chance, chance_of
from pipedejavu.simulate.clock import run_clock
from pipedejavu.simulate.memory import trace_footprint, trace_memory


@dataclass(frozen=True)
class Prediction:
    """Start and end of every operation of a program; summaries and the timeline are computed on demand."""

    graph: Graph
    start: list[float]
    end: list[float]

    @property
    def program(self) -> Program:
        """The program that was simulated."""
        return self.graph.program

    @cached_property
    def makespan_s(self) -> float:
        """End of the last action."""
        return max(self.end, default=0.0)

    @cached_property
    def chance(self) -> Chance:
        """The distribution of the program's time if its actions vary as they did when measured."""
        return chance_of(self.graph, self.makespan_s)

    @cached_property
    def bubble_fraction(self) -> float:
        """Idle share of the compute lanes of workers that train."""
        trains = [index for index, pieces in enumerate(self.program.pieces_on) if pieces]
        busy = sum(self.busy_s[worker] for worker in trains)
        whole = self.makespan_s * len(trains)
        return 1 - busy / whole if whole else 0.0

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Busy time of each worker's compute lane."""
        busy = []
        for ops, worker in zip(self.graph.of_action, self.program.workers, strict=True):
            spans = zip(ops, worker.actions, strict=True)
            busy.append(sum(self.end[op] - self.start[op] for op, a in spans if a.lane == "compute"))
        return tuple(busy)

    @property
    def samples_per_s(self) -> float:
        """Samples that are trained per second."""
        samples = sum(self.program.sizes) * self.program.plan.steps
        return samples / self.makespan_s if self.makespan_s else 0.0

    @property
    def memory_efficiency(self) -> float:
        """Samples per second and byte of the device that holds the most: the figure by which Hippie compares plans."""
        most = max((worker.peak_bytes for worker in self.workers), default=0.0)
        return self.samples_per_s / most if most else 0.0

    @cached_property
    def workers(self) -> tuple[WorkerSummary, ...]:
        """A summary for each worker of the program, memory curves included."""
        liveness = Liveness(self.program)
        with paused_collector():
            return tuple(self._summary(index, liveness) for index in range(len(self.program.workers)))

    def peaks(self) -> list[dict[str, float]]:
        """Returns the peak bytes of each worker, by memory; faster than `workers`, which has them, too."""
        liveness = Liveness(self.program)
        with paused_collector():
            workers = range(len(self.program.workers))
            return [peak_bytes(self._stays(index, liveness), liveness.fixed(index)) for index in workers]

    def footprints(self) -> list[Footprint | None]:
        """Returns the allocator footprint of each worker's GPU, None if not known; `workers` has them, too."""
        liveness = Liveness(self.program)
        if not liveness.sizes.is_detailed:
            return [None] * len(self.program.workers)
        with paused_collector():
            workers = range(len(self.program.workers))
            return [trace_footprint(liveness, index, self._stays(index, liveness)) for index in workers]

    def _stays(self, index: int, liveness: Liveness) -> list[Stay]:
        ops = self.graph.of_action[index]
        start, end = [self.start[op] for op in ops], [self.end[op] for op in ops]
        return liveness.stays(index, start, end, self.makespan_s)

    def _summary(self, index: int, liveness: Liveness) -> WorkerSummary:
        stays = self._stays(index, liveness)
        curves = trace_memory(liveness, index, stays, self.makespan_s)
        footprint = trace_footprint(liveness, index, stays)
        return WorkerSummary(
            worker=index,
            device=self.program.devices[index],
            copies=self.program.copies,
            busy_s=self.busy_s[index],
            peak_bytes=curves[0].peak_bytes,
            allocated_bytes=footprint.allocated_bytes if footprint else None,
            reserved_bytes=footprint.reserved_bytes if footprint else None,
            peak_live_microbatches=self._peak_live(index),
            weight_versions=count_versions(stays, self.program.held(index)),
            memory=curves,
        )

    def _peak_live(self, index: int) -> int:
        """Returns the most microbatches at once between the start of their forward and the end of their backward."""
        pieces, changes = self.program.pieces, []
        for op, a in zip(self.graph.of_action[index], self.program.workers[index].actions, strict=True):
            if a.kind == FORWARD and pieces[a.piece].opens_stage:
                changes.append((self.start[op], 1))
            elif a.kind in GRADIENT_KINDS and pieces[a.piece].opens_stage:
                changes.append((self.end[op], -1))
        live = most = 0
        for _, change in sorted(changes):
            live += change
            most = max(most, live)
        return most

    def timeline(self) -> Timeline:
        """Returns the prediction as a timeline."""
        rows = [
            (index, a.lane, str(a), self.start[op], self.end[op])
            for index, (ops, worker) in enumerate(zip(self.graph.of_action, self.program.workers, strict=True))
            for op, a in zip(ops, worker.actions, strict=True)
        ]
        worker, lane, action, start, end = zip(*rows, strict=True)
        return Timeline(
            origin="predicted",
            makespan_s=self.makespan_s,
            bubble_fraction=self.bubble_fraction,
            workers=self.workers,
            worker=worker,
            lane=lane,
            action=action,
            start_s=start,
            end_s=end,
        )


def simulate(program: Program, graph: Graph | None = None) -> Prediction:
    """Predicts when every action of a program runs; pass the `graph` that `verify` built to save time."""
    graph = graph or build_graph(program)
    return Prediction(graph, *run_clock(graph, ActionCosts(program).of(graph)))
