"""Ranks drafts by their real plans: each is written out, compiled and simulated, and the fastest are verified."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from pipedejavu.analysis import verify
from pipedejavu.facts import FaultsError, InputError, format_bytes, format_seconds
from pipedejavu.plan import Plan
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.program.action import COMPUTE_KINDS, OUTPUT_KINDS
from pipedejavu.search.candidate_plan import PlanningProblem
from pipedejavu.search.plan_writer import overlapped, why_not_run
from pipedejavu.search.search_options import SearchOptions
from pipedejavu.search.search_result import MemoryNeed, RankedPlan
from pipedejavu.simulate import Prediction, check_fit, simulate

NEAR = 1.01
"""Plans that take so many times the least are as fast, and the simplest of them comes first."""
FULL = (3, 5)
"""Microbatches for each stage among which a pipeline's pace can be seen, in most and in nearly all cases."""
EVEN = 1e-4
"""Part of a pace by which workers may differ in it."""


@dataclass(frozen=True)
class Timed:
    """A plan whose time is known; whether it is legal and fits is not."""

    plan: Plan
    prediction: Prediction
    """Of an update, or of so many of its microbatches that the others only repeat them."""
    pace_s: float
    """What each of the others adds."""
    problem: PlanningProblem
    estimated_s: float
    plainer: "Timed | None" = None
    """A slower form of the same plan, which may need less memory."""

    @property
    def others(self) -> int:
        """Microbatches that were not simulated."""
        return self.plan.feed.microbatches - self.prediction.program.plan.feed.microbatches

    @property
    def makespan_s(self) -> float:
        """The time of the whole program."""
        return self.prediction.makespan_s + self.others * self.pace_s

    @property
    def tail_s(self) -> float:
        """What follows the last backward of all workers."""
        prediction, workers = self.prediction, self.prediction.program.workers
        rows = zip(prediction.graph.of_action, workers, strict=True)
        spans = (pair for ops, worker in rows for pair in zip(ops, worker.actions, strict=True))
        return prediction.makespan_s - max(prediction.end[op] for op, a in spans if a.kind in COMPUTE_KINDS)

    def computes_s(self, worker: int) -> float:
        """Returns what a worker's forwards and backwards take."""
        prediction, program = self.prediction, self.prediction.program
        spans = zip(prediction.graph.of_action[worker], program.workers[worker].actions, strict=True)
        found = sum(prediction.end[op] - prediction.start[op] for op, a in spans if a.kind in COMPUTE_KINDS)
        return found * (1 + self.others / program.plan.feed.microbatches)

    @cached_property
    def time_s(self) -> float:
        """Of one update: the makespan; of a pipeline that never drains, what each further update adds."""
        plan, problem = self.plan, self.problem
        if not plan.is_flush_free:
            return self.makespan_s
        half = plan.replace(steps=plan.steps // 2)
        first = simulate(compile_plan(half, problem.profile, problem.machine)).makespan_s
        return (self.makespan_s - first) / (plan.steps - half.steps)


def time_plan(plan: Plan, problem: PlanningProblem, estimated_s: float) -> Timed | str:
    """Returns a plan with its simulated time, or why it has none.

    Of a pipeline with many microbatches so many are simulated that it is full for a while; the others go at the pace
    that it has then.
    """
    try:
        for short in _shortened(plan):
            prediction = simulate(compile_plan(short, problem.profile, problem.machine))
            if (pace_s := _pace(prediction)) is not None:
                break
        else:
            pace_s, prediction = 0.0, simulate(compile_plan(plan, problem.profile, problem.machine))
        resolved = prediction.program.plan
        resolved = resolved.replace(feed=resolved.feed.replace(microbatches=plan.feed.microbatches))
        return Timed(resolved, prediction, pace_s, problem, estimated_s)
    except FaultsError as fault:
        return fault.faults[0]
    except InputError as fault:
        return str(fault)


def faster_form(plan: Plan, timed: Timed) -> Timed:
    """Returns a plan as it was timed or, where that is faster, with sums of gradients beside its last backwards."""
    least_s = timed.makespan_s - timed.tail_s  # the backwards end no sooner
    other = overlapped(plan, timed.problem.profile) if NEAR * least_s < timed.makespan_s else None
    found = time_plan(other, timed.problem, timed.estimated_s) if other else None
    if isinstance(found, Timed) and NEAR * found.time_s < timed.time_s:
        return replace(found, plainer=timed)
    return timed


def _shortened(plan: Plan) -> Iterator[Plan]:
    """Yields a pipeline with fewer microbatches, as long as that would be many fewer."""
    has_turns = plan.place.chunks > 1 or plan.place.stage_replicas  # several microbatches at a time
    if plan.is_flush_free or plan.feed.kind == "share" or has_turns:
        return
    for full in FULL:
        few = full * _depth(plan)
        if plan.feed.microbatches >= 2 * few:
            yield plan.replace(feed=plan.feed.replace(microbatches=few))


def _depth(plan: Plan) -> int:
    return max(plan.place.workers, 2)


def _pace(prediction: Prediction) -> float | None:
    """Returns what a further microbatch adds to a full pipeline; None where its workers do not go at one pace.

    A pace may take turns: it is that of as many microbatches as there are stages, wherever one begins to count.
    """
    program, paces = prediction.program, list[float]()
    depth = _depth(program.plan)
    last = program.plan.feed.microbatches - depth  # from there on it empties
    for index, worker in enumerate(program.workers):
        piece = min(program.pieces_on[index])
        spans = zip(prediction.graph.of_action[index], worker.actions, strict=True)
        ends = [prediction.end[op] for op, a in spans if a.kind in OUTPUT_KINDS and a.piece == piece]
        paces += [(ends[at] - ends[at - depth]) / depth for at in (last - 2, last - 1, last)]
    return max(paces) if max(paces) - min(paces) <= EVEN * max(paces) else None


def admit(timed: Timed, options: SearchOptions) -> RankedPlan | str:
    """Returns a timed plan as a candidate once it is verified and fits, or why it is none."""
    prediction, problem, plan = timed.prediction, timed.problem, timed.plan
    try:
        verify(prediction.program, prediction.graph)
        reserved = check_fit(prediction)
    except FaultsError as fault:
        return fault.faults[0]
    memory = memory_needs(prediction, reserved)
    worst = max(memory, key=lambda need: need.share)
    if worst.share > 1:
        need, room = format_bytes(worst.need_bytes), format_bytes(worst.room_bytes)
        return f"device '{worst.device}' would need {need} and has {room}, as copies come late"
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


def _bubble(timed: Timed) -> float:
    """Returns the share of an update that devices are idle, of those that train."""
    prediction, program = timed.prediction, timed.prediction.program
    trains = [index for index, pieces in enumerate(program.pieces_on) if pieces]
    part = timed.others / timed.plan.feed.microbatches
    busy = sum(prediction.busy_s[worker] + part * timed.computes_s(worker) for worker in trains)
    whole = timed.makespan_s * len(trains)
    return max(0.0, 1 - busy / whole) if whole else 0.0


def price_of(timed: Timed, options: SearchOptions) -> float:
    """Returns what a plan's devices cost for one update."""
    machine, program = timed.problem.machine, timed.prediction.program
    sizes = dict(zip(program.devices, program.plan.degrees, strict=True))
    prices = (options.prices.get(machine.device(name).kind, 0.0) * size for name, size in sizes.items())
    return sum(prices) * timed.time_s / 3600


def memory_needs(prediction: Prediction, reserved: Mapping[str, float]) -> tuple[MemoryNeed, ...]:
    """Returns the highest need of each memory that a program uses, over its workers and what they keep on hosts.

    Of a team it is that of its first device: the others need as much. `reserved` is what is reserved of GPUs, where
    that is known.
    """
    program = prediction.program
    machine, needs = program.machine, dict[str, float]()
    sizes = dict(zip(program.devices, program.plan.degrees, strict=True))
    for worker, peaks in enumerate(prediction.peaks()):
        for copy in range(program.copies):
            device = machine.device(program.devices[worker + copy * len(program.workers)])
            for memory, peak in peaks.items():
                if memory == "device" or peak:
                    owner = device if memory == "device" else machine.cpu_of(device)
                    needs[owner.name] = needs.get(owner.name, 0.0) + peak
    found = []
    for name, need in needs.items():
        device, size = machine.device(name), sizes.get(name, 1)
        room = (device.memory_bytes - device.reserved_bytes) // size
        held = reserved[name] / size if name in reserved else None
        found.append(MemoryNeed(device=name, need_bytes=need / size, reserved_bytes=held, room_bytes=room))
    return tuple(found)


def _describe_bound(timed: Timed) -> str:
    """Returns what takes the most of an update: a worker's computing, waiting, or what follows its last backward."""
    prediction, program, whole = timed.prediction, timed.prediction.program, timed.makespan_s
    if not whole:
        return "nothing takes any time"
    worker = max(range(len(program.workers)), key=prediction.busy_s.__getitem__)
    spans = zip(prediction.graph.of_action[worker], program.workers[worker].actions, strict=True)
    ends = [prediction.end[op] for op, a in spans if a.kind in COMPUTE_KINDS]
    busy, last = timed.computes_s(worker), max(ends, default=0.0) + timed.others * timed.pace_s
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
