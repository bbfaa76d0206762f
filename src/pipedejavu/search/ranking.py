"""Simulated times of plans: each is compiled and simulated, and the fastest are verified and become ranked plans."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from pipedejavu.analysis import verify
from pipedejavu.facts import FaultsError, InputError, format_bytes, format_seconds
from pipedejavu.plan import Plan
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.program.action import COMPUTE_KINDS, OUTPUT_KINDS
from pipedejavu.search.candidate_plan import PlanningProblem
from pipedejavu.search.memory_limit import memory_limit_of
from pipedejavu.search.plan_writer import overlapped, why_not_run
from pipedejavu.search.search_options import SearchOptions
from pipedejavu.search.search_result import MemoryNeed, RankedPlan
from pipedejavu.simulate import Prediction, check_fit, simulate

NEAR = 1.01
"""Plans within this ratio of the fastest count as equally fast; the simplest of them comes first."""
DIVIDED_NEAR = 1.05
"""A plan that divides state or operators must be faster than one that does not by this ratio: it sends more messages,
and forecasts of plans that differ in that err by this much."""
FULL = (3, 5)
"""Microbatches per stage after which a pipeline is in its steady state, in most and in nearly all cases."""
EVEN = 1e-4
"""Workers agree on the steady time per microbatch if they differ by at most this ratio."""


@dataclass(frozen=True)
class Timed:
    """A plan with its simulated time; it is not yet verified."""

    plan: Plan
    prediction: Prediction
    """Simulation of an update, or of its first microbatches if the others only repeat them."""
    steady_s: float
    """Time that each microbatch adds that was not simulated."""
    problem: PlanningProblem
    estimated_s: float
    plainer: "Timed | None" = None
    """A slower form of the same plan, which may need less memory."""

    @property
    def others(self) -> int:
        """Microbatches per update that were not simulated."""
        return self.plan.feed.microbatches - self.prediction.program.plan.feed.microbatches

    @property
    def makespan_s(self) -> float:
        """The time of the whole program."""
        return self.prediction.makespan_s + self.others * self.steady_s

    @property
    def tail_s(self) -> float:
        """Time after the last backward of all workers."""
        prediction, workers = self.prediction, self.prediction.program.workers
        rows = zip(prediction.graph.of_action, workers, strict=True)
        spans = (pair for ops, worker in rows for pair in zip(ops, worker.actions, strict=True))
        return prediction.makespan_s - max(prediction.end[op] for op, a in spans if a.kind in COMPUTE_KINDS)

    def computes_s(self, worker: int) -> float:
        """Returns the time of a worker's forwards and backwards."""
        prediction, program = self.prediction, self.prediction.program
        spans = zip(prediction.graph.of_action[worker], program.workers[worker].actions, strict=True)
        simulated_s = sum(prediction.end[op] - prediction.start[op] for op, a in spans if a.kind in COMPUTE_KINDS)
        return simulated_s * (1 + self.others / program.plan.feed.microbatches)

    @cached_property
    def time_s(self) -> float:
        """Time of one update: the makespan or, if the pipeline never drains, what each further update adds."""
        plan, problem = self.plan, self.problem
        if not plan.is_flush_free:
            return self.makespan_s
        half = plan.replace(steps=plan.steps // 2)
        first = simulate(compile_plan(half, problem.profile, problem.machine)).makespan_s
        return (self.makespan_s - first) / (plan.steps - half.steps)


def time_plan(plan: Plan, problem: PlanningProblem, estimated_s: float) -> Timed | str:
    """Returns a plan with its simulated time, or the reason why it has none.

    A pipeline with many microbatches is simulated until it is in its steady state; each further microbatch then adds
    the same time.
    """
    try:
        for short in _shortened(plan):
            prediction = simulate(compile_plan(short, problem.profile, problem.machine))
            if (steady_s := _steady(prediction)) is not None:
                break
        else:
            steady_s, prediction = 0.0, simulate(compile_plan(plan, problem.profile, problem.machine))
        resolved = prediction.program.plan
        resolved = resolved.replace(feed=resolved.feed.replace(microbatches=plan.feed.microbatches))
        return Timed(resolved, prediction, steady_s, problem, estimated_s)
    except FaultsError as fault:
        return fault.faults[0]
    except InputError as fault:
        return str(fault)


def faster_form(plan: Plan, timed: Timed) -> Timed:
    """Returns the timed plan or, if that is faster, its form whose reductions overlap with the last backwards."""
    least_s = timed.makespan_s - timed.tail_s  # the backwards end no sooner
    other = overlapped(plan, timed.problem.profile) if NEAR * least_s < timed.makespan_s else None
    faster = time_plan(other, timed.problem, timed.estimated_s) if other else None
    if isinstance(faster, Timed) and NEAR * faster.time_s < timed.time_s:
        return replace(faster, plainer=timed)
    return timed


def _shortened(plan: Plan) -> Iterator[Plan]:
    """Yields the pipeline with fewer microbatches, if that is at most half of them."""
    has_turns = plan.place.chunks > 1 or plan.place.stage_replicas  # these take microbatches in groups
    if plan.is_flush_free or plan.feed.kind == "share" or has_turns:
        return
    for full in FULL:
        few = full * _depth(plan)
        if plan.feed.microbatches >= 2 * few:
            yield plan.replace(feed=plan.feed.replace(microbatches=few))


def _depth(plan: Plan) -> int:
    return max(plan.place.workers, 2)


def _steady(prediction: Prediction) -> float | None:
    """Returns the time per microbatch in the steady state; None if the workers do not agree on it.

    The time may alternate between microbatches, so it is averaged over as many as there are stages, from three starts.
    """
    program, times = prediction.program, list[float]()
    depth = _depth(program.plan)
    last = program.plan.feed.microbatches - depth  # from there on the pipeline drains
    for index, worker in enumerate(program.workers):
        piece = min(program.pieces_on[index])
        spans = zip(prediction.graph.of_action[index], worker.actions, strict=True)
        ends = [prediction.end[op] for op, a in spans if a.kind in OUTPUT_KINDS and a.piece == piece]
        times += [(ends[at] - ends[at - depth]) / depth for at in (last - 2, last - 1, last)]
    return max(times) if max(times) - min(times) <= EVEN * max(times) else None


def admit(timed: Timed, options: SearchOptions) -> RankedPlan | str:
    """Returns a timed plan as a ranked plan if it verifies and fits, or the reason why not."""
    prediction, problem, plan = timed.prediction, timed.problem, timed.plan
    try:
        verify(prediction.program, prediction.graph)
        reserved = check_fit(prediction)
    except FaultsError as fault:
        return fault.faults[0]
    memory = memory_needs(prediction, reserved)
    worst = max(memory, key=lambda need: need.share)
    if worst.share > 1:
        need, limit = format_bytes(worst.need_bytes), format_bytes(worst.room_bytes)
        return f"device '{worst.device}' would need {need} and has {limit}, as copies come late"
    return RankedPlan(
        plan=plan,
        time_s=timed.time_s,
        samples=options.batch,
        price=price_of(timed, options),
        bubble_fraction=_bubble(timed),
        memory=memory,
        bound=_describe_bound(timed),
        reasons=tuple(f"{d.axis}: {d.choice}: {d.reason}" for d in plan.decisions),
        estimated_s=timed.estimated_s,
        only_costed=why_not_run(plan),
        machine=problem.machine,
        profile=problem.profile,
    )


def shortages(timed: Timed) -> dict[str, int]:
    """Returns the bytes that a plan needs beyond each memory, or that the allocator of a device would reserve."""
    prediction, program = timed.prediction, timed.prediction.program
    footprints, count = prediction.footprints(), len(program.workers)
    reserved: dict[str, float] = {}
    for index, name in enumerate(program.devices):
        footprint = footprints[index % count]
        reserved[name] = reserved.get(name, 0.0) + (footprint.reserved_bytes if footprint else 0.0)
    missing = {}
    for need in memory_needs(prediction, reserved):
        most = max(need.need_bytes, need.reserved_bytes or 0.0)
        if most > need.room_bytes:
            missing[need.device] = ceil(most - need.room_bytes)
    return missing


def _bubble(timed: Timed) -> float:
    """Returns the idle share of an update, over the workers that train."""
    prediction, program = timed.prediction, timed.prediction.program
    trains = [index for index, pieces in enumerate(program.pieces_on) if pieces]
    part = timed.others / timed.plan.feed.microbatches
    busy = sum(prediction.busy_s[worker] + part * timed.computes_s(worker) for worker in trains)
    whole = timed.makespan_s * len(trains)
    return max(0.0, 1 - busy / whole) if whole else 0.0


def price_of(timed: Timed, options: SearchOptions) -> float:
    """Returns the price of a plan's devices for one update."""
    machine, program = timed.problem.machine, timed.prediction.program
    sizes = dict(zip(program.devices, program.plan.degrees, strict=True))
    prices = (options.prices.get(machine.device(name).kind, 0.0) * size for name, size in sizes.items())
    return sum(prices) * timed.time_s / 3600


def memory_needs(prediction: Prediction, reserved: Mapping[str, float]) -> tuple[MemoryNeed, ...]:
    """Returns the peak need of each memory, over a program's workers and what they keep on hosts.

    A tensor-parallel group is listed by its first device: the others need as much. `reserved` has the bytes that the
    allocators of GPUs reserve, if known.
    """
    program = prediction.program
    machine, needs = program.machine, dict[str, float]()
    sizes = dict(zip(program.devices, program.plan.degrees, strict=True))
    for worker, peaks in enumerate(prediction.peaks()):
        for copy in range(program.copies):
            device = machine.device(program.devices[worker + copy * len(program.workers)])
            for where, peak in peaks.items():
                if where == "device" or peak:
                    owner = device if where == "device" else machine.cpu_of(device)
                    needs[owner.name] = needs.get(owner.name, 0.0) + peak
    memory = []
    for name, need in needs.items():
        device, size = machine.device(name), sizes.get(name, 1)
        limit = memory_limit_of(device) // size
        held = reserved[name] / size if name in reserved else None
        memory.append(MemoryNeed(device=name, need_bytes=need / size, reserved_bytes=held, room_bytes=limit))
    return tuple(memory)


def _describe_bound(timed: Timed) -> str:
    """Returns what takes most of an update on the busiest worker: compute, waits, or the time after its backwards."""
    prediction, program, whole = timed.prediction, timed.prediction.program, timed.makespan_s
    if not whole:
        return "nothing takes any time"
    worker = max(range(len(program.workers)), key=prediction.busy_s.__getitem__)
    spans = zip(prediction.graph.of_action[worker], program.workers[worker].actions, strict=True)
    ends = [prediction.end[op] for op, a in spans if a.kind in COMPUTE_KINDS]
    busy, last = timed.computes_s(worker), max(ends, default=0.0) + timed.others * timed.steady_s
    parts = {"computes": busy, "waits for others": last - busy, "reduces and updates": whole - last}
    what = max(parts, key=parts.__getitem__)
    name = f"{_describe(program, worker)} on {program.devices[worker]}"
    return f"{name} {what} for {format_seconds(parts[what])} of {format_seconds(whole)} ({parts[what] / whole:.0%})"


def _describe(program: Program, worker: int) -> str:
    pieces = sorted(program.pieces_on[worker])
    units = [u for piece in pieces for u in program.pieces[piece].units]
    if not units or len(units) == len(program.profile.units):
        return "the whole model"
    stage = program.pieces[pieces[0]].stage
    return f"stage {stage} (units {min(units)} to {max(units)})"
