"""Ranks drafts by their real plans: each is written out, compiled and simulated, and the fastest are verified."""

from collections.abc import Sequence
from typing import NamedTuple

from pipedejavu.facts import FaultsError, InputError, format_bytes, format_seconds
from pipedejavu.plan import Plan
from pipedejavu.program import Program, verify
from pipedejavu.program import compile as compile_plan
from pipedejavu.search.draft import Scene
from pipedejavu.search.option import Options
from pipedejavu.search.result import Candidate, MemoryNeed
from pipedejavu.search.write import why_not_run
from pipedejavu.simulate import Prediction, simulate


class Timed(NamedTuple):
    """A plan whose time is known; whether it is legal and fits is not."""

    prediction: Prediction
    scene: Scene
    time_s: float
    """Of one update."""
    price: float
    estimated_s: float


def time_plan(plan: Plan, scene: Scene, options: Options, estimated_s: float) -> Timed | str:
    """Returns a plan with its simulated time, or why it has none."""
    try:
        program = compile_plan(plan, scene.profile, scene.machine)
        prediction = simulate(program)
    except FaultsError as fault:
        return fault.faults[0]
    except InputError as fault:
        return str(fault)
    time_s = _time_of_update(plan, scene, prediction)
    return Timed(prediction, scene, time_s, price_of(program.devices, scene, options, time_s), estimated_s)


def admit(timed: Timed, options: Options) -> Candidate | str:
    """Returns a timed plan as a candidate once it is verified and fits, or why it is none."""
    prediction, scene = timed.prediction, timed.scene
    plan = prediction.program.plan
    try:
        verify(prediction.program)
    except FaultsError as fault:
        return fault.faults[0]
    memory = memory_needs(prediction)
    worst = max(memory, key=lambda need: need.share)
    if worst.share > 1:
        need, room = format_bytes(worst.need_bytes), format_bytes(worst.room_bytes)
        return f"device '{worst.device}' would need {need} and has {room}, as copies come late"
    return Candidate(
        plan=plan,
        time_s=timed.time_s,
        samples=options.batch,
        price=timed.price,
        bubble_fraction=prediction.bubble_fraction,
        memory=memory,
        bound=describe_bound(prediction),
        reasons=tuple(f"{d.axis}: {d.choice}: {d.reason}" for d in plan.decisions),
        estimated_s=timed.estimated_s,
        only_costed=scene.only_costed or why_not_run(plan),
        machine=scene.machine,
        profile=scene.profile,
    )


def _time_of_update(plan: Plan, scene: Scene, prediction: Prediction) -> float:
    """Returns the makespan; of a pipeline that never drains, what each further update adds."""
    if not plan.is_flush_free:
        return prediction.makespan_s
    half = plan.but(steps=plan.steps // 2)
    first = simulate(compile_plan(half, scene.profile, scene.machine)).makespan_s
    return (prediction.makespan_s - first) / (plan.steps - half.steps)


def price_of(devices: Sequence[str], scene: Scene, options: Options, time_s: float) -> float:
    """Returns what devices cost for a time."""
    kinds = (scene.machine.device(name).kind for name in dict.fromkeys(devices))
    return sum(options.prices.get(kind, 0.0) for kind in kinds) * time_s / 3600


def memory_needs(prediction: Prediction) -> tuple[MemoryNeed, ...]:
    """Returns the highest need of each memory that a program uses, over its workers and what they keep on hosts."""
    program = prediction.program
    machine, needs = program.machine, dict[str, float]()
    for worker in prediction.workers:
        for copy in range(program.copies):
            device = machine.device(program.devices[worker.worker + copy * len(program.workers)])
            for curve in worker.memory:
                owner = device if curve.memory == "device" else machine.cpu_of(device)
                needs[owner.name] = needs.get(owner.name, 0.0) + curve.peak_bytes
    rooms = {name: machine.device(name).memory_bytes - machine.device(name).reserved_bytes for name in needs}
    return tuple(MemoryNeed(device=name, need_bytes=need, room_bytes=rooms[name]) for name, need in needs.items())


def describe_bound(prediction: Prediction) -> str:
    """Returns what takes the most of an update: a worker's computing, waiting, or what follows its last backward."""
    program, whole = prediction.program, prediction.makespan_s
    if not whole:
        return "nothing takes any time"
    worker = max(range(len(program.workers)), key=prediction.busy_s.__getitem__)
    ops, actions = prediction.graph.of_action[worker], program.workers[worker].actions
    spans = [(prediction.start[op], prediction.end[op], a) for op, a in zip(ops, actions, strict=True)]
    computes = [(start, end) for start, end, a in spans if a.kind in ("F", "B", "R", "I", "W")]
    busy, last = sum(end - start for start, end in computes), max((end for _, end in computes), default=0.0)
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
