"""Measurements before a run starts: messages between workers, and the model on each kind of device of the plan."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from pipedejavu.engine import Job
from pipedejavu.facts import Link, Machine, Profile
from pipedejavu.plan import Plan, Precision
from pipedejavu.plan.plan_trait import division_of
from pipedejavu.planner.cache import find, keep
from pipedejavu.planner.measure import measure
from pipedejavu.planner.planning import MOST_SAMPLES, machine_key, source_hash
from pipedejavu.planner.profiling import MeasureSetup
from pipedejavu.planner.worker_host import devices_to_measure, num_threads, num_threads_beside, torch_device
from pipedejavu.probe.memory_link import measure_worker_link
from pipedejavu.profile import TimeBudget, background_load, merge_profiles
from pipedejavu.program.pipeline import assign_devices
from pipedejavu.run.options import TrainOptions
from pipedejavu.runtime.compiled_unit import UnitCompiler
from pipedejavu.runtime.compute_precision import ComputeFormat
from pipedejavu.session.rank_group import RankGroup
from pipedejavu.source.task import Prepared, draw, prepare

_NOT_MEASURED = {
    *("steps", "seed", "lr", "schedule", "warmup", "weight_decay", "clip_norm", "weights", "log", "keeps_log"),
    *("on_nan", "max_consecutive_skips", "byzantine", "init_candidates", "init_steps", "check_model", "check_replicas"),
    *("eval", "eval_data", "eval_every", "epochs", "sample", "price"),
    *("on_oom", "replan", "checkpoint_every", "hang_after_s", "compile"),
}
"""Options that change neither the units of a model nor how long they take, and `compile`, which the plan settles."""


def measure_messages(plan: Plan, machine: Machine) -> Link:
    """Measures messages between workers of this host; for a pipeline while the other workers compute."""
    names = assign_devices(plan, machine)
    devices = [torch_device(machine, name) for name in names]
    with background_load(num_threads_beside(machine, names, 0) if plan.pipeline_size > 1 else 0):
        return measure_worker_link(devices)


def open_model(options: TrainOptions, plan: Plan) -> Prepared:
    """Opens the model that is measured: cut for the plan's microbatches, with random weights."""
    job, batches = prepare(options.replace(weights=None), (plan.feed.samples,), plan.cut.begins)
    # The only worker of a plan may run in this process, on units that the measurement has compiled.
    compiler = UnitCompiler() if plan.num_workers == 1 else None
    return Prepared(replace(job, compiler=compiler), batches)


def measure_plan(
    options: TrainOptions,
    plan: Plan,
    machine: Machine,
    names: Sequence[str],
    ranks: RankGroup,
    prepared: list[Prepared],
    *,
    renews: bool = False,
    eager: Profile | None = None,
) -> Profile:
    """Measures the model on each kind of device that the plan uses, on the rank of the first worker of that kind.

    A host that only updates is not measured if `eager`, the profile of the search, has its times.
    Opens the model if `prepared` does not have it, and appends it there. Units are timed compiled if the plan's are.
    Uses cached measurements unless `renews` is set.
    """
    profiles, budget = [], TimeBudget(options.measure_budget_s)
    computing = {machine.device(name).kind for name in names}
    for kind, (worker, name) in sorted(devices_to_measure(plan, machine, names).items(), key=lambda item: item[1]):
        if kind not in computing and eager is not None and all(kind in unit.times for unit in eager.units):
            profiles.append(_only(eager, kind))
            continue
        source, profile_json = worker if ranks.is_launched else 0, b""
        if ranks.rank == source:
            torch.set_num_threads(num_threads(machine, names, worker))
            if not prepared:
                prepared.append(open_model(options, plan))
            if compiler := prepared[0].job.compiler:
                compiler.has_parameters = machine.device(name).type == "gpu"
            beside = num_threads_beside(machine, names, worker)
            setup = MeasureSetup(kind, torch_device(machine, name), torch.get_num_threads(), beside)
            profile_json = _find_or_measure(options, plan, setup, prepared[0], budget, renews=renews).to_json().encode()
        profiles.append(Profile.from_json(ranks.broadcast(profile_json, source)))
    return merge_profiles(profiles)


def describes_plan(profile: Profile, plan: Plan, machine: Machine, names: Sequence[str]) -> bool:
    """Whether a profile that was measured for a search has all that a plan runs, at sizes up to its microbatches."""
    kinds = devices_to_measure(plan, machine, names)
    costs = [unit.times[kind].forward for unit in profile.units for kind in kinds if kind in unit.times]
    most = max((size for cost in costs for size in cost.measured_s), default=0)
    return len(costs) == len(profile.units) * len(kinds) and plan.feed.samples <= max(most, MOST_SAMPLES)


def _find_or_measure(
    options: TrainOptions, plan: Plan, setup: MeasureSetup, prepared: Prepared, budget: TimeBudget, *, renews: bool
) -> Profile:
    """Returns the cached profile of these units on this machine, or measures one and writes it to the cache."""
    key = {
        "options": options.model_dump(mode="json", exclude=_NOT_MEASURED),
        "content": source_hash(options.model),
        "can_switch": options.can_switch,
        "feed": (plan.feed.kind, plan.feed.samples),
        "begins": plan.cut.begins,
        "is_compiled": plan.is_compiled,
        "setup": setup,
        **({"division": division} if (division := division_of(plan)) else {}),
        **({} if plan.precision == Precision() else {"precision": str(plan.precision)}),
        **machine_key(),
    }
    profile = None if renews else find(Profile, key)
    if profile is None or not _describes(profile, prepared.job, plan.precision):
        with background_load(setup.beside):
            profile = _measure_here(options, plan, {setup.kind: setup.device}, prepared, budget)
        keep(profile, key)
    return profile


def _describes(profile: Profile, job: Job, precision: Precision) -> bool:
    """Whether a profile has the units of a job: the model's code may have changed since it was cached."""
    form = ComputeFormat.of(precision, [module for _, module in job.units])
    sizes = [(name, form.weight_bytes(module)) for name, module in job.units]
    return [(unit.name, unit.parameter_bytes) for unit in profile.units] == sizes


def _only(profile: Profile, kind: str) -> Profile:
    """Returns a profile with its times on one kind of device."""
    units = tuple(unit.replace(times={kind: unit.times[kind]}) for unit in profile.units)
    estimated = {name: text for name, text in profile.estimated.items() if name == kind}
    return profile.replace(units=units, estimated=estimated)


def _measure_here(
    options: TrainOptions, plan: Plan, kinds: dict[str, torch.device], prepared: Prepared, budget: TimeBudget
) -> Profile:
    job, batches = prepared
    # Planning again needs costs at several microbatch sizes; only a chain has the same units at all of them.
    return measure(
        options.model,
        job,
        plan,
        batches.first,
        partial(draw, batches.task.data, options.seed),
        kinds,
        at_more=options.can_switch and batches.cut.method == "chain" and not plan.is_compiled,
        is_compiled=plan.is_compiled,
        budget=budget,
    )
