"""Before a run starts: measures the model on the devices of its plan, compiles the plan, and checks both."""

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from pipedejavu.data.data_choice import check_choice
from pipedejavu.engine import Byzantine, check_runnable
from pipedejavu.engine.filter_masks import check_filters
from pipedejavu.engine.log_check import check_replayable
from pipedejavu.facts import InputError, Link, Machine, Profile
from pipedejavu.launch.handover import Handover
from pipedejavu.launch.measure_plan import describes_plan, measure_messages, measure_plan, open_model
from pipedejavu.launch.resident_check import check_resident
from pipedejavu.launch.run_check import check_run
from pipedejavu.plan import Plan
from pipedejavu.planner.compile_choice import CompiledPlan, asked_plan, decide_compile, refuse_compile, with_mode
from pipedejavu.planner.measure import explain_estimates
from pipedejavu.planner.precision_choice import with_precision
from pipedejavu.planner.replan import check_replan
from pipedejavu.planner.worker_host import (
    DeviceChoice,
    WorkerHost,
    describe_stand_ins,
    make_machine,
    read_worker_hosts,
)
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.program.limit import check_stages
from pipedejavu.program.pipeline import assign_devices
from pipedejavu.program.tp_group import written_out
from pipedejavu.run.checkpoint_interval import choose_interval, steps_of
from pipedejavu.run.options import TrainOptions
from pipedejavu.run.run_folder import RunStart
from pipedejavu.session.rank_group import RankGroup
from pipedejavu.source.chosen_data import data_choice
from pipedejavu.source.graph_plan import check_blocks
from pipedejavu.source.hub_data import fetch_data
from pipedejavu.source.initial_weights import describe_dtype
from pipedejavu.source.model_source import check_sources
from pipedejavu.source.precision import trained_dtype
from pipedejavu.source.task import Prepared


class PlannedRun(NamedTuple):
    """A run that is ready to start."""

    options: TrainOptions
    program: Program
    note: str
    """Devices that stand in for others, the checkpoint interval, and what the model check could not compare; may be
    empty."""


def plan_run(
    options: TrainOptions,
    plan: Plan,
    machine: Machine | None = None,
    *,
    devices: DeviceChoice = "auto",
    ranks: RankGroup | None = None,
    start: RunStart | None = None,
    profile: Profile | None = None,
    eager: Profile | None = None,
    renews: bool = False,
    prepared: list[Prepared] | None = None,
) -> PlannedRun:
    """Measures the model on the devices that the plan uses and compiles the plan; all ranks of a group call it.

    A synchronous plan becomes a program of one update, which the run repeats; any other plan becomes one program up to
    the next checkpoint. With a `profile` nothing is measured, and `machine` is the machine of that profile. With
    `eager`, the profile that the plan was searched for, only compiled units are measured, if they could pay. `renews`
    measures again what is in the cache. The model, if it is built, is put into `prepared`.
    """
    ranks = ranks or RankGroup()
    options = TrainOptions.from_json(ranks.broadcast(options.to_json().encode()))
    start = start or RunStart()
    origin = "" if start.step else _check_sources(options, ranks)
    choice = data_choice(options)
    fetch_data(choice)
    check_choice(choice)
    plan = written_out(Plan.from_json(ranks.broadcast(plan.to_json().encode())))
    plan = _adapt(plan, options, ranks, start)
    profile_json = ranks.broadcast(profile.to_json().encode() if profile else b"")
    prepared = [] if prepared is None else prepared
    worker_hosts = ranks.worker_hosts() or read_worker_hosts(plan.num_workers)
    machine_json = ranks.broadcast(machine.to_json().encode() if machine else b"")
    if machine_json:
        machine = Machine.from_json(machine_json)
        machine = machine.divided(plan.num_workers) if plan.place.devices is None and not profile_json else machine
    else:
        prepared += _open_first(options, plan) if ranks.is_first and not profile_json else []
        plan, machine = _measure_machine(plan, worker_hosts, devices, ranks)
    names = assign_devices(plan, machine)
    if not profile_json:
        plan = _settle_precision(plan, options, machine, names, ranks, prepared)
    if profile_json:
        profile = Profile.from_json(profile_json)
        plan = with_mode(plan, options.compile)
    else:
        measured = options, machine, names, ranks, prepared
        plan, profile = _settle_compile(plan, *measured, start=start, renews=renews, eager=eager)
        plan = plan.replace(decisions=(*plan.decisions, *explain_estimates(profile)))
    program = _compile(plan, profile, machine, ranks)
    check_runnable(program)
    check_blocks(options.model, program)
    epochs = ""
    if options.epochs is not None:
        options, epochs = _count_steps(options, program, ranks, start, prepared)
        steps = steps_of(plan, options, start.step)
        if steps != plan.steps:
            plan = plan.replace(steps=steps)
            program = _compile(plan, profile, machine, ranks)
    check_resident(options, program, ranks, prepared)
    remark = check_run(options, program, ranks, prepared) if options.check_model and not start.step else ""
    if options.byzantine:
        Byzantine.parse(options.byzantine).check(program.plan, program.num_replicas)
    every, interval = choose_interval(options, program)
    notes = filter(None, (epochs, describe_stand_ins(machine, names, worker_hosts), interval, remark, origin))
    return PlannedRun(options.replace(checkpoint_every=every), program, "\n".join(notes))


def _count_steps(
    options: TrainOptions, program: Program, ranks: RankGroup, start: RunStart, prepared: list[Prepared]
) -> tuple[TrainOptions, str]:
    """Returns the options with as many steps as the epochs take, and a sentence about it."""
    size_text = b""
    if ranks.is_first:
        data = prepared[0].batches.task.data if prepared else open_model(options, program.plan).batches.task.data
        size_text = str(len(data)).encode()
    size, per_update = int(ranks.broadcast(size_text)), sum(program.sizes)
    assert options.epochs is not None
    left = max(0, options.epochs * size - start.samples)
    steps = max(1, start.step + -(-left // per_update))
    over = start.samples + (steps - start.step) * per_update - options.epochs * size
    more = f"; the last update has {over} samples of the next" if over > 0 else ""
    if per_update > size:
        more += "; an update takes more samples than an epoch has, and a smaller --batch makes more updates"
    return options.replace(steps=steps), (
        f"{options.epochs} {'epoch' if options.epochs == 1 else 'epochs'} of {size} samples: {steps} updates of"
        f" {per_update}{more}"
    )


def _compile(plan: Plan, profile: Profile, machine: Machine, ranks: RankGroup) -> Program:
    """Returns the program that the first rank compiles, on all ranks; raises the same InputError on all of them."""
    if not ranks.is_launched:
        return compile_plan(plan, profile, machine, fold=False)
    packed = b""
    if ranks.is_first:
        with suppress(InputError):  # raised below, where every rank then compiles
            packed = Handover(compile_plan(plan, profile, machine, fold=False)).pack()
    packed = ranks.broadcast(packed)
    return Handover.unpack(packed).program if packed else compile_plan(plan, profile, machine, fold=False)


def _check_sources(options: TrainOptions, ranks: RankGroup) -> str:
    """Returns a note on the weights of a new run; raises InputError if its weights or data are not there."""
    if not ranks.is_first:
        return ""
    check_sources(options)
    return "" if options.weights is None else describe_dtype(options.weights, options.parameter_dtype)


def _settle_precision(
    plan: Plan,
    options: TrainOptions,
    machine: Machine,
    names: Sequence[str],
    ranks: RankGroup,
    prepared: list[Prepared],
) -> Plan:
    """Returns the plan with the precision that the options ask for, as the first rank chooses it."""
    text, error = b"", ""
    if ranks.is_first:
        dtype = getattr(torch, options.parameter_dtype)
        if ".py:" in options.model:  # the user's function may make a model of any format
            prepared += [] if prepared else [open_model(options, plan)]
            dtype = trained_dtype(prepared[0].batches.task.model)
        try:
            devices = [machine.device(name) for name in names]
            text = with_precision(plan, options.asked_precision, devices, dtype=dtype).to_json().encode()
        except InputError as fault:
            error = str(fault)
    text = ranks.broadcast(text)
    if not text:
        raise InputError(error or "the first rank refuses the precision")
    return Plan.from_json(text)


def _settle_compile(
    plan: Plan,
    options: TrainOptions,
    machine: Machine,
    names: Sequence[str],
    ranks: RankGroup,
    prepared: list[Prepared],
    *,
    start: RunStart,
    renews: bool,
    eager: Profile | None = None,
) -> CompiledPlan:
    """Measures the units of a plan, unless `eager` has them; returns the plan with the decision about compiling."""

    def measure(plan: Plan) -> Profile:
        return measure_plan(options, plan, machine, names, ranks, prepared, renews=renews, eager=searched)

    searched = eager
    if eager is not None and not describes_plan(eager, plan, machine, names):
        eager = None
    if (asked := asked_plan(plan, options.compile)) is not None:
        return CompiledPlan(asked, eager if eager and not asked.is_compiled else measure(asked))
    eager = eager or measure(plan)
    counted = options
    if options.epochs is not None:
        counted, _ = _count_steps(options, _compile(plan, eager, machine, ranks), ranks, start, prepared)
    steps = counted.steps - start.step
    refused = refuse_compile(plan, eager, machine, steps)
    refused = Plan.from_json(ranks.broadcast(refused.to_json().encode()))  # hosts may differ in their compilers
    if refused.decisions != plan.decisions:
        return CompiledPlan(refused, eager)
    return decide_compile(plan, eager, measure(plan.replace(is_compiled=True)), machine, steps)


def _open_first(options: TrainOptions, plan: Plan) -> list[Prepared]:
    """Opens the model before anything is measured if the plan asks for units or filters that it may not have."""
    if plan.pipeline_size == 1 and plan.feed.kind != "mask":
        return []
    opened = open_model(options, plan)
    if plan.feed.kind == "mask":
        check_filters(plan, opened.job, opened.batches)
    else:
        check_stages(plan, options.model, len(opened.job.units))
    return [opened]


def _measure_machine(
    plan: Plan, worker_hosts: tuple[WorkerHost, ...], devices: DeviceChoice, ranks: RankGroup
) -> tuple[Plan, Machine]:
    """Returns the plan on the devices of the hosts, and the machine with its messages measured."""
    plan, machine = make_machine(plan, worker_hosts, devices)
    if plan.num_workers == 1:
        return plan, machine
    # The cost of messages decides how work is divided, and how long a step takes.
    link_json = measure_messages(plan, machine).to_json().encode() if ranks.is_first else b""
    link = Link.from_json(ranks.broadcast(link_json))
    return plan, machine.replace(links=(link, *machine.links[1:]))


def _adapt(plan: Plan, options: TrainOptions, ranks: RankGroup, start: RunStart) -> Plan:
    """Returns the plan changed as the options ask; raises InputError if the plan cannot do what they ask."""
    if ranks.is_launched and plan.num_workers != ranks.size:
        raise InputError(
            f"plan '{plan.name}' has {plan.num_workers} workers and torchrun started {ranks.size} processes; start one"
            " for each worker, or change --workers"
        )
    if plan.keep.kind == "shared" and not ranks.is_on_one_host:
        raise InputError(f"plan '{plan.name}' shares weights in the memory of one host; start all its workers there")
    if options.keeps_log:
        check_replayable(plan)
    if options.can_switch:
        check_replan(options, plan)
    if options.on_nan == "skip" and plan.version.kind != "sync":
        raise InputError(
            f"plan '{plan.name}' has no common moment to agree on leaving an update out; use --on-nan stop"
        )
    if (options.clip_norm is not None or options.on_nan == "skip") and plan.reduce.clip == "none":
        plan = plan.replace(reduce=plan.reduce.replace(clip="global"))
    first = start.step if plan.version.flushed_updates else 0
    return plan.replace(steps=steps_of(plan, options, start.step), first_update=first)
