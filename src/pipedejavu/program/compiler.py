"""`compile`: from a plan, a profile and a machine to the program, by small steps."""

from collections import Counter
from collections.abc import Sequence

from pipedejavu.facts import Device, InputError, Machine, Profile, paused_collector
from pipedejavu.plan import Decision, Plan
from pipedejavu.plan.rule import check_plan
from pipedejavu.program.action import Action
from pipedejavu.program.cut import balance, cut_pieces, piece_inputs
from pipedejavu.program.limit import check_passes, check_size
from pipedejavu.program.passes import add_layout_collectives, add_recompute, add_transfers, add_version_drops
from pipedejavu.program.pipeline import Pipeline, assign_devices, pipelines_of, with_counts
from pipedejavu.program.program import Group, Piece, Program, Worker
from pipedejavu.program.residency import add_residency
from pipedejavu.program.share import ShareSplit, cut_samples
from pipedejavu.program.tp_group import join, tp_groups_of
from pipedejavu.program.update import add_updates, server_actions


def compile(plan: Plan, profile: Profile, machine: Machine, *, fold: bool = True) -> Program:  # noqa: A001
    """Returns the program of a plan; with `fold`, replicas that behave alike are held once.

    The plan inside the program has every automatic choice filled in and its reason recorded; the machine inside it has
    one device for each team. Raises FaultsError for a plan that breaks a rule and InputError for one that the machine
    has no room for.
    """
    check_plan(plan, profile)
    check_size(plan, profile)
    tp_groups = [*tp_groups_of(plan, assign_devices(plan, machine))]
    profile, machine = join(profile, machine, tp_groups)
    devices = tuple(tp_group[0] for tp_group in tp_groups)
    plan = _resolve_cut(plan, profile, machine, devices)
    pipelines = pipelines_of(plan)
    plan, parts = _resolve_parts(plan, profile, machine, pipelines, devices)
    pipelines = with_counts(pipelines, [len(part) for part in parts], plan.place.shards)
    pieces = cut_pieces(plan, profile, plan.cut.bounds or ())
    copies = len(pipelines) if fold and _is_symmetric(plan, profile, machine, devices) else 1
    active = [pipeline for pipeline in pipelines if pipeline.count]
    check_passes(plan, 1 if copies > 1 else len(active), len(pieces))
    program = Program(
        plan=plan,
        profile=profile,
        machine=machine,
        pieces=pieces,
        inputs=piece_inputs(profile, pieces),
        workers=(),
        groups=_groups(plan, profile, pieces, active),
        devices=devices,
        parts=tuple(parts[:: plan.place.shards]),
        num_replicas=1 + max(replica for pipeline in pipelines for replica, _ in pipeline.homes()),
        copies=copies,
    )
    with paused_collector():
        program = _with_workers(program, active[:1] if copies > 1 else active)
        for add in _PASSES:
            program = add(program)
    return program


def _with_servers(program: Program) -> Program:
    """Adds the servers, with the updates that they make."""
    plan = program.plan
    if program.copies > 1 or not plan.place.servers:
        return program
    servers = []
    for n in range(plan.place.servers):
        pieces = [p for p in range(len(program.pieces)) if p % plan.place.servers == n]
        actions = tuple(server_actions(program, pieces)) if plan.reduce.wire == "server" else ()
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
        first = {stage: worker for (_, stage), worker in reversed(pipeline.homes().items())}
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
    """Returns for each crew the samples of its microbatches of an update."""
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


def _groups(plan: Plan, profile: Profile, pieces: tuple[Piece, ...], pipelines: list[Pipeline]) -> dict[str, Group]:
    """Returns who takes part in which collective.

    's2' is everyone that holds stage 2, 't2.0' the shards of replica 0's stage 2 and 'd2.0' the same for
    the gradients of what they do not divide, 'tie0.1' the workers whose pieces share parameters in replica 1,
    'all' everyone whose gradients count in the norm.
    """
    holders: dict[tuple[int, int], list[int]] = {}
    for pipeline in pipelines:
        for (replica, stage), worker in pipeline.homes().items():
            holders.setdefault((stage, replica), []).append(worker)
    stages = sorted({stage for stage, _ in holders})
    helpers: tuple[int, ...] = ()
    if plan.reduce.wire == "summation-service":
        helpers = tuple(range(plan.num_workers - plan.place.servers, plan.num_workers))
    groups = {}
    if plan.reduce.wire in ("all-reduce", "reduce-scatter", "summation-service"):
        for stage in stages:
            # Each worker of a sharded stage reduces with its like in the other replicas.
            members = [ws[0] for (s, _), ws in sorted(holders.items()) if s == stage]
            if len(members) > 1:
                groups[f"s{stage}"] = Group(workers=tuple(members), helpers=helpers)
    if plan.place.shards > 1:
        for (stage, replica), workers in holders.items():
            groups[f"t{stage}.{replica}"] = Group(workers=tuple(workers))
            if plan.sums_over_shards:
                groups[f"d{stage}.{replica}"] = Group(workers=tuple(workers))
    home = {unit: piece.stage for piece in pieces for unit in piece.units}
    for index, tie in enumerate(profile.ties):
        tied = {home[profile.position[unit]] for unit in tie.units}
        if len({i for i, p in enumerate(pieces) if {profile.position[u] for u in tie.units} & set(p.units)}) > 1:
            for replica in sorted({q for _, q in holders}):
                sharers = {w for stage in tied for w in holders.get((stage, replica), ())}
                groups[f"tie{index}.{replica}"] = Group(workers=tuple(sorted(sharers)))
    if plan.reduce.clip != "none":
        groups["all"] = Group(workers=tuple(sorted({w for ws in holders.values() for w in ws})))
    return groups


def _with_workers(program: Program, pipelines: list[Pipeline]) -> Program:
    """Gives each worker its forwards and backwards, stage by stage as scheduled, piece by piece."""
    plan, size = program.plan, program.update_size
    of_stage: dict[int, list[int]] = {}
    for index, piece in enumerate(program.pieces):
        of_stage.setdefault(piece.stage, []).append(index)
    sequences: dict[int, list[Action]] = {}
    limits: dict[int, int] = {}
    ready: set[int] = set()
    for pipeline in pipelines:
        rounds, count = (1, pipeline.count * plan.steps) if plan.is_flush_free else (plan.steps, pipeline.count)
        for rank, worker in enumerate(pipeline.workers):
            sequence = sequences.setdefault(worker, [])
            for t in range(rounds):
                for kind, chunk, k in pipeline.slots(rank, count):
                    replica, stage = pipeline.home(rank, chunk)
                    n = t * pipeline.count + k
                    microbatch = n // pipeline.count * size + pipeline.offset + n % pipeline.count
                    order = of_stage[stage] if kind == "F" else reversed(of_stage[stage])
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


def _is_symmetric(plan: Plan, profile: Profile, machine: Machine, devices: tuple[str, ...]) -> bool:
    """Whether every pipeline has the same work, the same kinds of devices and the same links as the first."""
    place, size = plan.place, plan.pipeline_size
    copies = place.replicas * place.shards
    if copies == 1 or place.cpu_replicas or plan.reduce.wire == "server" or plan.feed.kind in ("share", "mask"):
        return False
    if place.shards > 1 and place.replicas > 1 and not _wires_are_private(machine):
        return False
    rows = [devices[c * size : (c + 1) * size] for c in range(copies)]
    found = [[machine.device(name) for name in row] for row in rows]
    like = {tuple((d.kind, d.memory_bytes, d.reserved_bytes) for d in row) for row in found}
    if len(like) > 1:
        return False
    if plan.keep.kind in ("host", "split") and not _share_cpus_alike(machine, found):
        return False
    # In a chain only neighbours talk, or the ends of a loop.
    distances = {1, size - 1} - {0} if profile.edges is None else set(range(1, size))
    pairs = [(a, b) for a in range(size) for b in range(size) if abs(a - b) in distances]
    ends = [[(row[a], row[b]) for row in rows] for a, b in pairs]
    if plan.keep.kind in ("host", "split") or plan.keep.activations == "host" or plan.prefetches_data:
        hosts = [[(machine.cpu_of(row[a]).name, row[a].name) for row in found] for a in range(size)]
        hosts = [row for row in hosts if row[0][0] != row[0][1]]
        ends += hosts + [[(device, host) for host, device in row] for row in hosts]
    for alike in ends:
        routes = [machine.route(*pair) for pair in alike]
        if len({r._replace(wires=()) for r in routes}) > 1:
            return False
        users = Counter(wire for route in routes for wire in route.wires)
        if len({tuple(users[wire] for wire in route.wires) for route in routes}) > 1:
            return False
    return True


def _share_cpus_alike(machine: Machine, rows: Sequence[Sequence[Device]]) -> bool:
    """Whether every CPU updates for as many pipelines, and for the same of their workers."""
    columns = {tuple(machine.cpu_of(device).name for device in column) for column in zip(*rows, strict=True)}
    is_even = all(len({*Counter(column).values()}) == 1 for column in columns)
    return is_even and sum(len({*column}) for column in columns) == len({name for c in columns for name in c})


def _wires_are_private(machine: Machine) -> bool:
    return all("{source}" in wire and "{target}" in wire for link in machine.links for wire in link.wires)
