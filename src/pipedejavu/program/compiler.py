"""`compile`: turns a plan, a profile and a machine into a program, in small passes."""

from itertools import accumulate

from pipedejavu.facts import InputError, Machine, Profile, paused_collector
from pipedejavu.plan import Decision, Plan
from pipedejavu.plan.rule import check_plan
from pipedejavu.program.action import FORWARD, Action
from pipedejavu.program.cut import balance, cut_pieces, piece_inputs
from pipedejavu.program.group import make_groups
from pipedejavu.program.limit import check_passes, check_size
from pipedejavu.program.offload_choice import resolve_offload
from pipedejavu.program.passes import add_layout_collectives, add_recompute, add_transfers, add_version_drops
from pipedejavu.program.pipeline import Pipeline, assign_devices, pipelines_of, with_counts
from pipedejavu.program.program import Program, Worker
from pipedejavu.program.residency import add_residency
from pipedejavu.program.share import ShareSplit, cut_samples
from pipedejavu.program.symmetry import is_symmetric
from pipedejavu.program.tp_group import join, tp_groups_of, written_out
from pipedejavu.program.update import add_updates, helper_actions, server_actions


def compile(plan: Plan, profile: Profile, machine: Machine, *, fold: bool = True) -> Program:  # noqa: A001
    """Returns the program of a plan; with `fold`, identical pipelines are held once.

    The plan inside the program has every automatic choice resolved and its reason recorded; the machine inside it has
    one device per tensor-parallel group. Raises FaultsError if the plan breaks a rule and InputError if the machine
    has too few devices.
    """
    check_plan(plan, profile)
    profile = profile.with_head_chunks(plan.order.head_chunks)
    check_size(plan, profile)
    if not fold:
        plan = written_out(plan)
    tp_groups = [*tp_groups_of(plan, assign_devices(plan, machine))]
    profile, machine = join(profile, machine, tp_groups, plan.cut.layouts)
    devices = tuple(tp_group[0] for tp_group in tp_groups)
    plan = _resolve_cut(plan, profile, machine, devices)
    pipelines = pipelines_of(plan)
    plan, parts = _resolve_parts(plan, profile, machine, pipelines, devices)
    pipelines = with_counts(pipelines, [len(part) for part in parts], plan.tensor_shards)
    pieces = cut_pieces(plan, profile, plan.cut.bounds or ())
    copies = len(pipelines) if fold and is_symmetric(plan, profile, machine, devices) else 1
    active = [pipeline for pipeline in pipelines if pipeline.count]
    check_passes(plan, 1 if copies > 1 else len(active), len(pieces))
    program = Program(
        plan=plan,
        profile=profile,
        machine=machine,
        pieces=pieces,
        inputs=piece_inputs(profile, pieces),
        workers=(),
        groups=make_groups(plan, profile, pieces, active),
        devices=devices,
        parts=tuple(parts[:: plan.tensor_shards]),
        num_replicas=1 + max(replica for pipeline in pipelines for replica, _ in pipeline.stage_workers()),
        copies=copies,
    )
    with paused_collector():
        program = resolve_offload(_with_workers(program, active[:1] if copies > 1 else active))
        for add in _PASSES:
            program = add(program)
    return program


def _with_servers(program: Program) -> Program:
    """Adds the servers and their updates."""
    plan = program.plan
    if program.copies > 1 or not plan.place.servers:
        return program
    servers = []
    for n in range(plan.place.servers):
        pieces = [p for p in range(len(program.pieces)) if p % plan.place.servers == n]
        actions = tuple(server_actions(program, pieces)) if plan.reduce.wire == "server" else ()
        if plan.reduce.wire == "summation-service":
            actions = tuple(helper_actions(program))
        servers.append(Worker(actions=actions, picks_ready=plan.reduce.gate in ("lock", "bound")))
    return program.with_workers((*program.workers, *servers))


_PASSES = (
    add_updates,
    _with_servers,
    add_recompute,
    add_residency,
    add_layout_collectives,
    add_transfers,
    add_version_drops,
)


def _resolve_cut(plan: Plan, profile: Profile, machine: Machine, devices: tuple[str, ...]) -> Plan:
    """Returns the plan with its stage bounds, and the reason if they were chosen here."""
    stages = plan.num_stages or len(profile.units)
    if plan.cut.stages not in (None, stages):
        raise InputError(
            f"the plan cuts {plan.cut.stages} stages, but its place has room for {stages}; leave cut.stages out, or"
            " change place.workers or place.chunks"
        )
    if plan.order.kind == "layer-major":
        plan = plan.replace(place=plan.place.replace(kind="loop", chunks=stages))
        bounds = tuple(range(1, stages))
        reason = "order 'layer-major' takes one unit at a time"
    elif plan.cut.bounds is not None:
        if len(plan.cut.bounds) != stages - 1:
            raise InputError(
                f"the plan's place has {stages} stages, so cut.bounds needs {stages - 1} numbers, not"
                f" {len(plan.cut.bounds)}"
            )
        return plan
    else:
        pipeline = pipelines_of(plan)[0]
        first = {stage: worker for (_, stage), worker in reversed(pipeline.stage_workers().items())}
        on = [machine.device(devices[first[stage]]) for stage in range(stages)]
        bounds = balance(profile, on, plan.feed.samples)
        reason = "the slowest stage's forward and backward time is least"
    if not bounds:
        return plan.replace(cut=plan.cut.replace(bounds=()))
    decision = Decision(axis="cut", choice=f"stages begin at units {', '.join(map(str, bounds))}", reason=reason)
    return plan.replace(cut=plan.cut.replace(bounds=bounds), decisions=(*plan.decisions, decision))


def _resolve_parts(
    plan: Plan, profile: Profile, machine: Machine, pipelines: list[Pipeline], devices: tuple[str, ...]
) -> tuple[Plan, list[tuple[int, ...]]]:
    """Returns the plan with its shares, and for each pipeline the samples of its microbatches per update."""
    feed = plan.feed
    if feed.kind != "share":
        return plan, [(feed.samples,) * feed.microbatches] * len(pipelines)
    split = ShareSplit(plan, profile, machine, pipelines, devices)
    samples, reason = split.choose()
    choice = " + ".join(map(str, samples)) + f" of {split.total} samples"
    decision = Decision(axis="feed", choice=choice, reason=reason)
    shares = tuple(count / split.total for count in samples)
    plan = plan.replace(feed=feed.replace(shares=shares), decisions=(*plan.decisions, decision))
    return plan, [cut_samples(count, feed.samples) for count in samples]


def _with_workers(program: Program, pipelines: list[Pipeline]) -> Program:
    """Adds the workers with their forwards and backwards in the order of the schedule."""
    plan, size = program.plan, program.update_size
    stage_pieces: dict[int, list[int]] = {}
    for index, piece in enumerate(program.pieces):
        stage_pieces.setdefault(piece.stage, []).append(index)
    sequences: dict[int, list[Action]] = {}
    limits: dict[int, int] = {}
    ready: set[int] = set()
    for pipeline in pipelines:
        spans = (1,) * plan.num_flushed + (plan.steps - plan.num_flushed,) if plan.is_flush_free else (1,) * plan.steps
        firsts = accumulate((0, *spans[:-1]))  # the update that each part between two flushes begins with
        parts = [(first * pipeline.count, span * pipeline.count) for first, span in zip(firsts, spans, strict=True)]
        for rank, worker in enumerate(pipeline.workers):
            sequence = sequences.setdefault(worker, [])
            for first, count in parts:
                for kind, chunk, k in pipeline.slots(rank, count):
                    replica, stage = pipeline.stage_of(rank, chunk)
                    n = first + k
                    microbatch = n // pipeline.count * size + pipeline.offset + n % pipeline.count
                    order = stage_pieces[stage] if kind == FORWARD else reversed(stage_pieces[stage])
                    sequence += [Action(kind, piece, replica, microbatch) for piece in order]
            if pipeline.schedule == "ready-first" and rank < len(pipeline.workers) - 1:
                ready.add(worker)
                limits[worker] = len(pipeline.workers) if rank == 0 else 0
    count = plan.num_workers - plan.place.servers if program.copies == 1 else len(pipelines[0].workers)
    workers = [
        Worker(actions=tuple(sequences.get(w, ())), picks_ready=w in ready, live_limit=limits.get(w, 0))
        for w in range(count)
    ]
    return program.with_workers(tuple(workers))
