"""The estimated cost of a whole candidate plan: the sum and the maximum over the costs of its stages."""

from collections.abc import Iterator
from typing import NamedTuple

from pipedejavu.facts import Machine
from pipedejavu.search.candidate_plan import CandidatePlan, Stage
from pipedejavu.search.memory_limit import memory_limit_of
from pipedejavu.search.recompute_segment import StageRecompute
from pipedejavu.search.slot import DeviceOrder, ScheduledSlot, cpu_of, schedule_slot
from pipedejavu.search.stage_cost import StageCosts


class PlanEstimate(NamedTuple):
    """Estimated time and memory of a candidate."""

    time_s: float
    """Time of one update."""
    memory: dict[str, float]
    """Peak bytes of each memory, by device."""
    shortage: float
    """The largest need relative to its memory limit; above 1 the candidate does not fit."""

    @property
    def fits(self) -> bool:
        """Whether all memory limits are kept."""
        return self.shortage <= 1


def estimate(candidate: CandidatePlan, costs: StageCosts) -> PlanEstimate:
    """Returns the estimate of a candidate that is not shared by speed."""
    machine = candidate.problem.machine
    total, later, slowest = 0.0, 0.0, 0.0
    memory: dict[str, float] = {}
    for stage, scheduled in schedule_of(candidate):
        cost = costs.stage(stage.start, stage.end, scheduled, candidate.mode)
        slowest = max(slowest, float(cost.remaining_s(later)))
        later += float(cost.sum_s)
        total += float(cost.total_s)
        for name in stage.group:
            memory[name] = memory.get(name, 0.0) + float(cost.device_bytes) / stage.shards
            if cost.host_bytes:
                cpu = cpu_of(machine, name)
                assert cpu is not None
                memory[cpu.name] = memory.get(cpu.name, 0.0) + float(cost.host_bytes) / stage.shards
    return PlanEstimate(total + slowest, memory, shortage_of(memory, machine))


def shortage_of(memory: dict[str, float], machine: Machine) -> float:
    """Returns the largest need relative to its memory limit."""
    return max(need / max(memory_limit_of(machine.device(name)), 1) for name, need in memory.items())


def schedule_of(candidate: CandidatePlan) -> Iterator[tuple[Stage, ScheduledSlot]]:
    """Yields the stages of a candidate with their scheduled slots, the last stage first."""
    size = candidate.sizes[0] if candidate.is_even and not candidate.has_tp_groups else 0
    device_order = DeviceOrder(candidate.problem, candidate.devices, size)
    after = workers = 0
    for stage in reversed(candidate.stages):
        slot = device_order.slot(after, stage.replicas, stage.shards)
        yield stage, schedule_slot(slot, candidate.microbatches, candidate.is_stale, stage.zero, workers)
        after, workers = after + len(stage.group), workers + stage.replicas


def recompute_of(candidate: CandidatePlan, costs: StageCosts) -> StageRecompute:
    """Returns what the stages of a candidate recompute."""
    units, checkpoints = list[int](), list[int]()
    for stage, scheduled in schedule_of(candidate):
        again = costs.recompute(stage.start, stage.end, scheduled, candidate.mode)
        units += again.units
        checkpoints += again.checkpoints
    return StageRecompute(tuple(sorted(units)), tuple(sorted(checkpoints)))
