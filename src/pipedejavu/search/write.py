"""Writes a draft out as a plan, with the reason for each choice; and says whether the engine runs it."""

from pipedejavu.facts import Cost, Profile, format_bytes
from pipedejavu.plan import Cut, Decision, Feed, Keep, Order, Place, Plan, Reduce, Version, faults_of, preset
from pipedejavu.program.crew import assign_devices
from pipedejavu.search.cost import Costs, recomputed_units
from pipedejavu.search.draft import Draft, bucket_bytes
from pipedejavu.search.option import Options

MOST_SLOTS = 4000
"""Microbatches times workers up to which other orders are tried."""
_ORDERS = {"zb-h1": "ZB-H1", "interleaved": "interleaved"}
_SMALLER = {"zb-v": "ZB-V", "dualpipe-v": "DualPipeV"}
"""Orders with still smaller bubbles, which pay where that of 1F1B is `LEAST_BUBBLE` of an update or more."""
LEAST_BUBBLE = 0.15
STALE_STEPS = 4
"""Updates in the program of a pipeline that never drains."""


def write(draft: Draft, options: Options, costs: Costs) -> Plan:
    """Returns the plan of a draft; its devices are named only where the machine's own order is another."""
    plan = Plan(
        name=_name(draft),
        cut=_cut(draft),
        place=_place(draft),
        feed=_feed(draft),
        order=_order(draft, recomputed_units(draft, costs)),
        version=Version(kind="double-buffer" if draft.is_stale else "sync"),
        reduce=_reduce(draft, options),
        keep=_keep(draft),
        steps=STALE_STEPS if draft.is_stale else 1,
        bucket_bytes=_bucket_bytes(draft),
        decisions=tuple(_decisions(draft)),
    )
    plain = plan.but(place=plan.place.but(devices=None))
    machine = draft.scene.asked.machine
    on_all = sum(plan.degrees) <= len(machine.devices)
    return plain if on_all and assign_devices(plain, machine) == plan.place.devices else plan


def other_orders(plan: Plan, profile: Profile) -> list[Plan]:
    """Returns a plain 1F1B pipeline under the other synchronous orders that can run it and may be faster."""
    workers, order, count = plan.place.workers, plan.order, plan.feed.microbatches
    is_plain = order.kind == "1f1b" and not order.is_eager and not plan.place.stage_replicas
    if not is_plain or workers * count > MOST_SLOTS:
        return []
    kept = tuple(d for d in plan.decisions if d.axis != "cut")
    has_bubble = workers - 1 >= LEAST_BUBBLE * (count + workers - 1)
    has_halves = any(time.weight_backward != Cost() for unit in profile.units for time in unit.times.values())
    found = []
    for name, title in (_ORDERS | _SMALLER if has_bubble else _ORDERS).items():
        taken = preset(name).plan
        decision = Decision(axis="order", choice=name, reason="simulated beside 1F1B, whose bubble it makes smaller")
        other = plan.but(
            name=f"{plan.name}, {title}",
            cut=plan.cut if taken.place.chunks == 1 else plan.cut.but(bounds=None),
            place=plan.place.but(kind=taken.place.kind, chunks=taken.place.chunks),
            order=taken.order,
            decisions=(*kept, decision),
        )
        is_useful = has_halves or not other.splits_backward
        if is_useful and (other.num_stages or 0) <= len(profile.units) and not faults_of(other, profile):
            found.append(other)
    return found


def overlapped(plan: Plan, profile: Profile) -> Plan | None:
    """Returns a pipeline whose replicas add gradients up beside its last backwards, or None where it cannot."""
    is_later = plan.place.workers > 1 and plan.reduce.wire == "all-reduce" and not plan.order.is_eager
    if not is_later or plan.is_flush_free or plan.feed.kind == "share":
        return None
    reason = "replicas add gradients up piece by piece while the last backward goes on, which is faster"
    other = plan.but(
        order=plan.order.but(is_eager=True),
        decisions=(*plan.decisions, Decision(axis="order", choice="eager", reason=reason)),
    )
    return None if faults_of(other, profile) else other


def stashed(plan: Plan, options: Options) -> list[Plan]:
    """Returns a pipeline that never drains as PipeDream, where weights may be old enough.

    It stashes more than two versions, and so may have fewer and larger microbatches.
    """
    if plan.version.kind != "double-buffer" or options.samples is not None:
        return []
    batch, behind = options.batch // plan.place.replicas, plan.place.workers - 1
    counts = [n for n in range(-(-behind // options.staleness), behind) if batch % n == 0]
    if not counts:
        return []
    count, samples = counts[0], batch // counts[0]
    choice = f"{count} microbatch{'es' * (count > 1)} of {samples} sample{'s' * (samples > 1)}"
    age = -(-behind // count)
    reason = f"weights may be {options.staleness} updates old, and are {age} with so few"
    return [
        plan.but(
            name=plan.name.replace("2BW", "PipeDream"),
            feed=plan.feed.but(microbatches=count, samples=samples),
            version=Version(kind="stash"),
            keep=plan.keep.but(versions=None),
            steps=STALE_STEPS * age,
            decisions=(
                *(d for d in plan.decisions if d.axis != "feed"),
                Decision(axis="feed", choice=choice, reason=reason),
            ),
        )
    ]


def why_not_run(plan: Plan) -> str:
    """Returns why the engine does not run a plan; empty where it does."""
    what = [f"state over replicas (keep '{plan.keep}')"] * plan.keep.kind.startswith("zero")
    what += [f"operators over devices (place '{plan.place}')"] * (plan.place.stage_shards is not None)
    what += ["operators over workers (cut 'layout')"] * (plan.cut.kind == "layout")
    return f"the engine does not yet divide {' or '.join(what)}" if what else ""


def _name(draft: Draft) -> str:
    sizes = draft.sizes
    if len(sizes) == 1:
        text = "one device" if sizes[0] == 1 else f"{sizes[0]} shares" if draft.is_shared else f"{sizes[0]} replicas"
    elif draft.is_even:
        text = f"{len(sizes)} stages" + (f" × {sizes[0]}" if sizes[0] > 1 else "")
    else:
        text = f"stages {'-'.join(map(str, sizes))}"
    text += f" + {len(draft.cpus)} CPU{'s' * (len(draft.cpus) > 1)}" if draft.cpus else ""
    extra = ", ".join(["2BW"] * draft.is_stale + ([] if draft.mode.is_plain else [draft.keeping]))
    return ", ".join([text] + [extra] * bool(extra) + [draft.note] * bool(draft.note))


def _cut(draft: Draft) -> Cut:
    begins = draft.scene.profile.begins
    if len(draft.stages) == 1:
        return Cut(begins=begins)
    return Cut(kind="chain", bounds=tuple(stage.start for stage in draft.stages[1:]), begins=begins)


def _place(draft: Draft) -> Place:
    sizes, scene = draft.sizes, draft.scene
    stage_shards = draft.degrees if max(draft.degrees) > 1 else None
    if draft.is_shared and not draft.cpus:
        gpus = [name for name in draft.devices if scene.machine.device(name).type == "gpu"]
        cpus = [name for name in draft.devices if name not in gpus]
        num_cpus = len(cpus) if gpus else 0
        members = tuple(name for lead in (*gpus, *cpus) for name in scene.team(lead))
        count = len(draft.devices) - num_cpus
        return Place(replicas=count, cpu_replicas=num_cpus, stage_shards=stage_shards, devices=members)
    if not draft.is_even:
        members = tuple(name for lead in draft.devices for name in scene.team(lead))
        return Place(workers=len(sizes), stage_replicas=sizes, stage_shards=stage_shards, devices=members)
    leads = (
        name
        for r in range(sizes[0])
        for stage in draft.stages
        for name in stage.group[r * stage.shards : (r + 1) * stage.shards]
    )
    members = tuple(name for lead in leads for name in scene.team(lead)) + draft.cpus
    return Place(
        workers=len(sizes),
        replicas=sizes[0],
        stage_shards=stage_shards,
        cpu_replicas=len(draft.cpus),
        devices=members,
    )


def _feed(draft: Draft) -> Feed:
    if draft.is_shared:
        return Feed(kind="share", microbatches=draft.microbatches, samples=draft.samples)
    size = draft.sizes[0] if draft.is_even else 1
    return Feed(microbatches=draft.microbatches // size, samples=draft.samples)


def _order(draft: Draft, again: tuple[int, ...]) -> Order:
    mode = draft.mode
    fetches = mode.activations == "host" or mode.state == "window" or (mode.zero == 3 and len(draft.stages) == 1)
    pieces = mode.goes_by_pieces or (len(draft.stages) == 1 and draft.sizes[0] > 1 and not draft.is_shared)
    kind = "step" if len(draft.stages) == 1 else "1f1b-async" if draft.is_stale else "1f1b"
    return Order.model_validate(
        {"kind": kind, "prefetch": int(fetches), "is_eager": pieces, **_recompute(again, draft)}
    )


def _recompute(again: tuple[int, ...], draft: Draft) -> dict[str, object]:
    everything = len(again) == len(draft.scene.profile.units)
    return {"recompute": 1.0} if everything else {"recompute_units": again} if again else {}


def _bucket_bytes(draft: Draft) -> int:
    if draft.mode.goes_by_pieces:
        return 1
    return int(bucket_bytes(sum(unit.gradient_bytes for unit in draft.scene.profile.units)))


def _reduce(draft: Draft, options: Options) -> Reduce:
    wire = "none" if max(draft.sizes) == 1 and not draft.cpus else "reduce-scatter" if draft.mode.zero else "all-reduce"
    clip = "delayed" if options.clip == "global" and draft.is_stale else options.clip
    return Reduce.model_validate({"wire": wire, "clip": clip})


def _keep(draft: Draft) -> Keep:
    mode, activations = draft.mode, draft.mode.activations
    if draft.is_stale:
        return Keep(versions=2)
    if mode.zero:
        zeros = tuple(stage.zero for stage in draft.stages)
        return Keep.model_validate(
            {
                "kind": f"zero-{mode.zero}",
                "zeros": zeros if len({*zeros}) > 1 else None,
                "persists": mode.zero == 3 and len(draft.stages) > 1,
            }
        )
    if mode.state == "window":
        return Keep(kind="host", window=2, activations=activations)
    if mode.state == "host":
        return Keep(kind="split", device_pieces=mode.device_pieces, activations=activations)
    return Keep(activations=activations)


def _decisions(draft: Draft) -> list[Decision]:
    """Returns what was chosen, and why."""
    found = []
    units = draft.scene.profile.units
    if len(draft.stages) > 1:
        bounds = ", ".join(str(stage.start) for stage in draft.stages[1:])
        reason = "with these the sum over stages and the slowest stage are least together"
        found.append(Decision(axis="cut", choice=f"stages begin at units {bounds}", reason=reason))
        size = sum(unit.gradient_bytes for unit in units)
        unlike = ", ".join(f"{s.replicas} × units {s.start} to {s.end - 1}" for s in draft.stages)
        if not draft.is_even:
            reason = f"replicas add up {format_bytes(size)} of gradients where all stages have them"
            found.append(Decision(axis="place", choice=unlike, reason=reason))
    if max(draft.degrees) > 1:
        teams = zip(draft.stages, draft.degrees, strict=True)
        choice = ", ".join(f"units {s.start} to {s.end - 1} over {n} devices" for s, n in teams if n > 1)
        reason = "divided, they fit or take less time, all-reduces of their boundaries counted in"
        found.append(Decision(axis="place", choice=choice, reason=reason))
    count = draft.microbatches // (draft.sizes[0] if draft.is_even else 1)
    choice = f"{count} microbatch{'es' * (count > 1)} of {draft.samples} sample{'s' * (draft.samples > 1)}"
    if not draft.is_shared:  # of shares, `compile` says who gets how many
        found.append(Decision(axis="feed", choice=choice, reason="the best of the sizes that divide the batch and fit"))
    if not draft.mode.is_plain:
        reason = "of what fits, this costs least time"
        found.append(Decision(axis="keep", choice=draft.keeping, reason=reason))
    return found
