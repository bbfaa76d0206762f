"""Writes a candidate as a plan with the reason for each choice, and says whether the engine runs it."""

from pipedejavu.facts import Cost, Profile, format_bytes
from pipedejavu.facts.head_form import form_at
from pipedejavu.plan import Cut, Decision, Feed, Keep, Order, Place, Plan, Reduce, Version, faults_of, preset
from pipedejavu.plan.plan_trait import why_not_divided
from pipedejavu.program.pipeline import assign_devices
from pipedejavu.search.candidate_plan import CandidatePlan, bucket_bytes
from pipedejavu.search.plan_estimate import recompute_of
from pipedejavu.search.recompute_segment import StageRecompute
from pipedejavu.search.search_options import SearchOptions
from pipedejavu.search.stage_cost import StageCosts

MOST_WORK_ITEMS = 4000
"""Microbatches times workers up to which other schedules are tried."""
_ORDERS = (("zb-h1", "ZB-H1", 1), ("interleaved", "interleaved", 2))
"""Presets of other schedules, with their titles and the chunks of units per worker."""
_SMALLER = (("interleaved", "interleaved × 4", 4), ("zb-v", "ZB-V", 2), ("dualpipe-v", "DualPipeV", 2))
"""Schedules with still smaller bubbles; tried if the bubble of 1F1B is at least `LEAST_BUBBLE`."""
LEAST_BUBBLE = 0.15
"""Share of an update."""
STALE_STEPS = 4
"""Updates in the program of a pipeline that never drains."""


def write(candidate: CandidatePlan, options: SearchOptions, costs: StageCosts) -> Plan:
    """Returns the plan of a candidate; it names devices only if they differ from the machine's own order."""
    plan = Plan(
        name=_name(candidate),
        cut=_cut(candidate),
        place=_place(candidate),
        feed=_feed(candidate),
        order=_order(candidate, recompute_of(candidate, costs)),
        version=Version(kind="double-buffer" if candidate.is_stale else "sync"),
        reduce=_reduce(candidate, options),
        keep=_keep(candidate),
        precision=options.precision,
        steps=STALE_STEPS if candidate.is_stale else 1,
        bucket_bytes=_bucket_bytes(candidate),
        decisions=tuple(_decisions(candidate)),
    )
    plain = plan.replace(place=plan.place.replace(devices=None))
    machine = candidate.problem.original.machine
    on_all = sum(plan.degrees) <= len(machine.devices)
    return plain if on_all and assign_devices(plain, machine) == plan.place.devices else plan


def other_orders(plan: Plan, profile: Profile) -> list[Plan]:
    """Returns a plain 1F1B pipeline under the other synchronous schedules that may be faster."""
    workers, order, count = plan.place.workers, plan.order, plan.feed.microbatches
    is_plain = order.kind == "1f1b" and not order.is_eager and not plan.place.stage_replicas
    if not is_plain or workers * count > MOST_WORK_ITEMS:
        return []
    kept = tuple(d for d in plan.decisions if d.axis != "cut")
    has_bubble = workers - 1 >= LEAST_BUBBLE * (count + workers - 1)
    has_halves = any(time.weight_backward != Cost() for unit in profile.units for time in unit.times.values())
    plans = []
    for name, title, chunks in (*_ORDERS, *_SMALLER) if has_bubble else _ORDERS:
        source, choice = preset(name).plan, name if chunks <= 2 else f"{name} with {chunks} chunks per worker"
        decision = Decision(axis="order", choice=choice, reason="simulated beside 1F1B, whose bubble it makes smaller")
        other = plan.replace(
            name=f"{plan.name}, {title}",
            cut=plan.cut if chunks == 1 else plan.cut.replace(bounds=None),
            place=plan.place.replace(kind=source.place.kind, chunks=chunks),
            order=source.order.replace(head_chunks=order.head_chunks),
            decisions=(*kept, decision),
        )
        is_useful = has_halves or not other.splits_backward
        if is_useful and (other.num_stages or 0) <= len(profile.units) and not faults_of(other, profile):
            plans.append(other)
    return plans


def overlapped(plan: Plan, profile: Profile) -> Plan | None:
    """Returns the pipeline with reductions that overlap with its last backwards, or None if it has none to overlap."""
    is_later = plan.place.workers > 1 and plan.reduce.wire == "all-reduce" and not plan.order.is_eager
    if not is_later or plan.is_flush_free or plan.feed.kind == "share":
        return None
    reason = "replicas add gradients up piece by piece while the last backward goes on, which is faster"
    other = plan.replace(
        order=plan.order.replace(is_eager=True),
        decisions=(*plan.decisions, Decision(axis="order", choice="eager", reason=reason)),
    )
    return None if faults_of(other, profile) else other


def stashed(plan: Plan, options: SearchOptions) -> list[Plan]:
    """Returns a pipeline that never drains with PipeDream's weight stashing, if `staleness` allows it.

    It holds more than two weight versions, and so may have fewer and larger microbatches.
    """
    if plan.version.kind != "double-buffer" or options.samples is not None:
        return []
    batch, delay = options.batch // plan.place.replicas, plan.place.workers - 1
    counts = [n for n in range(-(-delay // options.staleness), delay) if batch % n == 0]
    if not counts:
        return []
    count, samples = counts[0], batch // counts[0]
    choice = f"{count} microbatch{'es' * (count > 1)} of {samples} sample{'s' * (samples > 1)}"
    age = -(-delay // count)
    reason = f"weights may be {options.staleness} updates old, and are {age} with so few"
    return [
        plan.replace(
            name=plan.name.replace("2BW", "PipeDream"),
            feed=plan.feed.replace(microbatches=count, samples=samples),
            version=Version(kind="stash"),
            keep=plan.keep.replace(versions=None),
            steps=STALE_STEPS * age,
            decisions=(
                *(d for d in plan.decisions if d.axis != "feed"),
                Decision(axis="feed", choice=choice, reason=reason),
            ),
        )
    ]


def why_not_run(plan: Plan) -> str:
    """Returns why the engine does not run a plan; empty if it does."""
    what = why_not_divided(plan)
    return f"the engine does not divide operators with {what}" if what else ""


def _name(candidate: CandidatePlan) -> str:
    sizes = candidate.sizes
    if len(sizes) == 1:
        one = "one group" if max(candidate.degrees) > 1 else "one device"
        text = one if sizes[0] == 1 else f"{sizes[0]} shares" if candidate.is_shared else f"{sizes[0]} replicas"
    elif len({*sizes}) == 1:
        text = f"{len(sizes)} stages" + (f" × {sizes[0]}" if sizes[0] > 1 else "")
    else:
        text = f"stages {'-'.join(map(str, sizes))}"
    chunks = candidate.problem.profile.head_chunks
    text += f", head in {chunks} chunks" * (chunks > 1)
    text += f" + {len(candidate.cpus)} CPU{'s' * (len(candidate.cpus) > 1)}" if candidate.cpus else ""
    extra = ", ".join(["2BW"] * candidate.is_stale + ([] if candidate.mode.is_plain else [candidate.keeping]))
    return ", ".join([text] + [extra] * bool(extra) + [candidate.note] * bool(candidate.note))


def _cut(candidate: CandidatePlan) -> Cut:
    begins, layouts = candidate.problem.profile.begins, candidate.problem.layouts
    if len(candidate.stages) == 1 and not layouts:
        return Cut(begins=begins)
    bounds = tuple(stage.start for stage in candidate.stages[1:])
    return Cut(kind="chain", bounds=bounds, begins=begins, layouts=layouts)


def _place(candidate: CandidatePlan) -> Place:
    sizes, problem = candidate.sizes, candidate.problem
    stage_shards = candidate.degrees if max(candidate.degrees) > 1 else None
    if candidate.is_shared and not candidate.cpus:
        gpus = [name for name in candidate.devices if problem.machine.device(name).type == "gpu"]
        cpus = [name for name in candidate.devices if name not in gpus]
        num_cpus = len(cpus) if gpus else 0
        devices = tuple(name for lead in (*gpus, *cpus) for name in problem.tp_group(lead))
        count = len(candidate.devices) - num_cpus
        return Place(replicas=count, cpu_replicas=num_cpus, stage_shards=stage_shards, devices=devices)
    if not candidate.is_even:
        devices = tuple(name for lead in candidate.devices for name in problem.tp_group(lead))
        return Place(workers=len(sizes), stage_replicas=sizes, stage_shards=stage_shards, devices=devices)
    leads = (
        name
        for r in range(sizes[0])
        for stage in candidate.stages
        for name in stage.group[r * stage.shards : (r + 1) * stage.shards]
    )
    devices = tuple(name for lead in leads for name in problem.tp_group(lead)) + candidate.cpus
    return Place(
        workers=len(sizes),
        replicas=sizes[0],
        stage_shards=stage_shards,
        cpu_replicas=len(candidate.cpus),
        devices=devices,
    )


def _feed(candidate: CandidatePlan) -> Feed:
    if candidate.is_shared:
        return Feed(kind="share", microbatches=candidate.microbatches, samples=candidate.samples)
    size = candidate.sizes[0] if candidate.is_even else 1
    return Feed(microbatches=candidate.microbatches // size, samples=candidate.samples)


def _order(candidate: CandidatePlan, recompute: StageRecompute) -> Order:
    mode = candidate.mode
    fetches = mode.activations == "host" or mode.state == "window" or (mode.zero == 3 and len(candidate.stages) == 1)
    is_data_parallel = len(candidate.stages) == 1 and candidate.sizes[0] > 1 and not candidate.is_shared
    is_data_parallel &= not mode.recomputes  # its segments are the pieces that are reduced
    is_step = len(candidate.stages) == 1 and candidate.is_even
    kind = "step" if is_step else "1f1b-async" if candidate.is_stale else "1f1b"
    return Order.model_validate(
        {
            "kind": kind,
            "prefetch": int(fetches),
            "is_eager": mode.goes_by_pieces or is_data_parallel,
            "head_chunks": candidate.problem.profile.head_chunks,
            **_recompute(recompute, candidate),
        }
    )


def _recompute(recompute: StageRecompute, candidate: CandidatePlan) -> dict[str, object]:
    units, is_all = recompute.units, len(recompute.units) == len(candidate.problem.profile.units)
    form: dict[str, object] = {"recompute": 1.0} if is_all else {"recompute_units": units} if units else {}
    if recompute.checkpoints and not candidate.mode.goes_by_pieces:
        form["checkpoints"] = recompute.checkpoints
    return form


def _bucket_bytes(candidate: CandidatePlan) -> int:
    if candidate.mode.goes_by_pieces:
        return 1
    return int(bucket_bytes(sum(unit.gradient_bytes for unit in candidate.problem.profile.units)))


def _reduce(candidate: CandidatePlan, options: SearchOptions) -> Reduce:
    wire = "reduce-scatter" if candidate.mode.zero else "all-reduce"
    if max(candidate.sizes) == 1 and not candidate.cpus:
        wire = "none"
    clip = "delayed" if options.clip == "global" and candidate.is_stale else options.clip
    return Reduce.model_validate({"wire": wire, "clip": clip})


def _keep(candidate: CandidatePlan) -> Keep:
    mode, activations = candidate.mode, candidate.mode.activations
    if candidate.is_stale:
        return Keep(versions=2)
    if mode.zero:
        zeros = tuple(stage.zero for stage in candidate.stages)
        return Keep.model_validate(
            {
                "kind": f"zero-{mode.zero}",
                "zeros": zeros if len({*zeros}) > 1 else None,
                "persists": mode.zero == 3 and len(candidate.stages) > 1,
            }
        )
    if mode.state == "window":
        return Keep(kind="host", window=2, activations=activations)
    if mode.state == "host":
        return Keep(kind="split", device_pieces=mode.device_pieces, activations=activations)
    return Keep(activations=activations)


def _saved_by_chunks(candidate: CandidatePlan) -> float:
    """Returns the bytes per microbatch that the head's chunks save at the peak of the last unit."""
    profile = candidate.problem.profile
    whole, now = (form_at(profile.head_forms, chunks) for chunks in (1, profile.head_chunks))
    peaks = [form.activation_bytes + max(form.forward_work_bytes, form.backward_work_bytes) for form in (whole, now)]
    return max(0.0, peaks[0] - peaks[1]) * candidate.samples


def _decisions(candidate: CandidatePlan) -> list[Decision]:
    """Returns the choices and their reasons."""
    decisions = []
    units = candidate.problem.profile.units
    if len(candidate.stages) > 1:
        bounds = ", ".join(str(stage.start) for stage in candidate.stages[1:])
        reason = "with these the sum over stages and the slowest stage are least together"
        decisions.append(Decision(axis="cut", choice=f"stages begin at units {bounds}", reason=reason))
        size = sum(unit.gradient_bytes for unit in units)
        unlike = ", ".join(f"{s.replicas} × units {s.start} to {s.end - 1}" for s in candidate.stages)
        if not candidate.is_even:
            reason = f"replicas add up {format_bytes(size)} of gradients where all stages have them"
            decisions.append(Decision(axis="place", choice=unlike, reason=reason))
    if max(candidate.degrees) > 1:
        tp_groups = zip(candidate.stages, candidate.degrees, strict=True)
        choice = ", ".join(f"units {s.start} to {s.end - 1} over {n} devices" for s, n in tp_groups if n > 1)
        reason = "divided, they fit or take less time, all-reduces of their boundaries counted in"
        decisions.append(Decision(axis="place", choice=choice, reason=reason))
    count = candidate.microbatches // (candidate.sizes[0] if candidate.is_even else 1)
    choice = f"{count} microbatch{'es' * (count > 1)} of {candidate.samples} sample{'s' * (candidate.samples > 1)}"
    if not candidate.is_shared:  # `compile` chooses the shares and gives the reason
        reason = "the best of the sizes that divide the batch and fit"
        decisions.append(Decision(axis="feed", choice=choice, reason=reason))
    chunks = candidate.problem.profile.head_chunks
    if chunks > 1:
        reason = f"it saves {format_bytes(_saved_by_chunks(candidate))} per microbatch in the last unit"
        decisions.append(Decision(axis="order", choice=f"the head and its loss in {chunks} chunks", reason=reason))
    if not candidate.mode.is_plain:
        reason = "of what fits, this costs least time"
        decisions.append(Decision(axis="keep", choice=candidate.keeping, reason=reason))
    return decisions
