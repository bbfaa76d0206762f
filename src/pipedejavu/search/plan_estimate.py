"""The cheap cost of a whole candidate plan: the sum and the maximum over the costs of its stages."""

from collections.abc import Iterator
from typing import NamedTuple

from pipedejavu.search.candidate_plan import CandidatePlan, Stage
from pipedejavu.search.slot import DeviceOrder, ScheduledSlot, cpu_of, slot_of
from pipedejavu.search.stage_cost import StageCosts


class PlanEstimate(NamedTuple):
    """What a whole draft costs."""

    time_s: float
    memory: dict[str, float]
    """The highest need of each memory, by device."""
    shortage: float
    """The largest need as a part of what is there; above 1 the draft does not fit."""

    @property
    def fits(self) -> bool:
        """Whether all memories suffice."""
        return self.shortage <= 1


def estimate(candidate: CandidatePlan, costs: StageCosts) -> PlanEstimate:
    """Returns what a draft of stages costs."""
    machine = candidate.problem.machine
    total, behind, slowest = 0.0, 0.0, 0.0
    memory: dict[str, float] = {}
    for stage, slot in slots_of(candidate):
        cost = costs.stage(stage.start, stage.end, slot, candidate.mode)
        slowest = max(slowest, float(cost.bound_s(behind)))
        behind += float(cost.sum_s)
        total += float(cost.total_s)
        for name in stage.group:
            memory[name] = memory.get(name, 0.0) + float(cost.device_bytes) / stage.shards
            if cost.host_bytes:
                cpu = cpu_of(machine, name)
                assert cpu is not None
                memory[cpu.name] = memory.get(cpu.name, 0.0) + float(cost.host_bytes) / stage.shards
    rooms = {name: machine.device(name).memory_bytes - machine.device(name).reserved_bytes for name in memory}
    shortage = max(memory[name] / max(room, 1) for name, room in rooms.items())
    return PlanEstimate(total + slowest, memory, shortage)


def slots_of(candidate: CandidatePlan) -> Iterator[tuple[Stage, ScheduledSlot]]:
    """Yields the stages of a draft, the last one first, and where they are."""
    row = DeviceOrder(
        candidate.problem,
        candidate.devices,
        candidate.sizes[0] if candidate.is_even and not candidate.has_teams else 0,
    )
    after = workers = 0
    for stage in reversed(candidate.stages):
        place = row.place(after, stage.replicas, stage.shards)
        yield stage, slot_of(place, candidate.microbatches, candidate.is_stale, stage.zero, workers)
        after, workers = after + len(stage.group), workers + stage.replicas


def recomputed_units(candidate: CandidatePlan, costs: StageCosts) -> tuple[int, ...]:
    """Returns the units of a draft that are computed again."""
    slots = slots_of(candidate)
    return tuple(
        sorted(u for at, slot in slots for u in costs.recomputed_units(at.start, at.end, slot, candidate.mode))
    )
