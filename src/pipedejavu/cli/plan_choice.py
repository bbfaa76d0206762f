"""The plan that `train` starts with: reads, searches or adapts it, as `choose_source` decides."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from pipedejavu.cli.input_files import read_plan
from pipedejavu.cli.plan_command import show_progress
from pipedejavu.cli.train_request import TrainRequest
from pipedejavu.facts import InputError, Machine, Profile, format_seconds
from pipedejavu.facts.printable import print_error, tell
from pipedejavu.plan import Decision, Plan, Precision, preset
from pipedejavu.probe.machine_shape import num_cores
from pipedejavu.program.tp_group import written_out
from pipedejavu.search import RankedPlan, SearchOptions

if TYPE_CHECKING:
    from pipedejavu.launch import RankGroup, Resumed, StartFacts
    from pipedejavu.planner.worker_host import WorkerHost
    from pipedejavu.run import TrainOptions


class ChosenPlan(NamedTuple):
    """The plan that a run starts with, and what is known for it."""

    plan: Plan
    profile: Profile | None
    """The profile of what will run; None if that is still to be settled."""
    machine: Machine | None
    eager: Profile | None = None
    """The profile that the plan was searched for."""


def choose(
    options: "TrainOptions",
    request: TrainRequest,
    ranks: "RankGroup",
    machine: Machine | None,
    resumed: "Resumed | None",
    worker_hosts: "Sequence[WorkerHost]",
) -> "ChosenPlan":
    """Returns the plan to train with, and what is known for it."""
    from pipedejavu.launch import PlanSource, choose_source, is_same_plan

    known, facts = resumed.known if resumed else None, _facts(options, request, ranks, resumed)
    source = choose_source(facts)
    if source is PlanSource.SWITCH:
        assert resumed
        assert known
        assert known.switch
        resumed.folder.add_metrics(known.switch.row(known.plan.name, resumed.start.step))
        return ChosenPlan(known.switch.plan, known.switch.profile, known.switch.machine)
    if source is PlanSource.RUN:
        assert known
        chosen = known.plan
    elif source is PlanSource.FIT:
        assert resumed
        chosen = _fit(resumed, request, worker_hosts)
    else:
        check_options(request, is_searched=source is PlanSource.SEARCH)
        if source is PlanSource.SEARCH:
            return _search(options, request, machine)
        chosen = choose_plan(request, facts.num_processes)
    if known and machine is None and is_same_plan(chosen, known.plan):
        return ChosenPlan(known.plan, known.profile, known.machine)
    return ChosenPlan(chosen, None, machine)


def _facts(
    options: "TrainOptions", request: TrainRequest, ranks: "RankGroup", resumed: "Resumed | None"
) -> "StartFacts":
    from pipedejavu.launch import StartFacts

    known = resumed.known if resumed else None
    switch = known.switch if known and options.on_oom == "replan" else None
    return StartFacts(
        num_processes=ranks.size if ranks.is_launched else None,
        known_workers=known.plan.num_workers if known else None,
        is_sync=known is None or known.plan.version.kind == "sync",
        switch_workers=switch.plan.num_workers if switch else None,
        has_request=request.has_plan,
        is_auto=request.plan == "auto",
        has_workers=request.workers is not None,
    )


def check_options(request: TrainRequest, *, is_searched: bool) -> None:
    """Raises InputError for options that do not go with the plan: one that is searched for, or one that is read."""
    if not is_searched and request.batch is not None:
        raise InputError("--batch is for --plan auto, which chooses the workers; give --microbatches and --samples")
    if not is_searched and request.tries > 1:
        raise InputError(
            "--try is for --plan auto that chooses the workers itself; leave it out, or else --workers, other plans and"
            " torchrun"
        )
    if is_searched and request.trim is not None:
        raise InputError("--trim is for plans that score contributions; use --plan preset:zeno")
    if is_searched and request.flushed_updates:
        raise InputError("--flushed-updates is for pipelines that never drain; use --plan preset:pipedream")
    if is_searched and request.cpu_share is not None:
        raise InputError(
            "--plan auto chooses the CPU's share itself; leave --cpu-share out, or use --plan preset:coarse"
        )
    fixed = [name for name in ("replicas", "microbatches") if request.sizes[name] is not None]
    if is_searched and fixed:
        raise InputError(f"--plan auto chooses the {fixed[0]}; give --batch, or a plan with --plan preset:NAME")


def _fit(resumed: "Resumed", request: TrainRequest, worker_hosts: "Sequence[WorkerHost]") -> Plan:
    """Returns a plan for the number of processes that torchrun started this time, and tells the user."""
    from pipedejavu.launch import fit_plan

    requested = None
    if request.plan != "auto":
        with suppress(InputError):
            requested = choose_plan(request, len(worker_hosts))
    assert resumed.known is not None
    before = resumed.known.plan
    plan: Plan = fit_plan(resumed.known, requested, worker_hosts, request.device_choice)
    counts = f"torchrun started {len(worker_hosts)} processes where the run had {before.num_workers} workers"
    reason = f"{counts}: it goes on under plan '{plan.name}' with the same batch"
    tell(reason)
    row = {"switched": resumed.start.step, "before": before.name, "plan": plan.name, "reason": reason}
    resumed.folder.add_metrics(row)
    return plan


def _search(options: "TrainOptions", request: TrainRequest, machine: Machine | None) -> ChosenPlan:
    """Returns the best plan that the engine runs, with its machine and profile."""
    from pipedejavu.launch import find_fastest
    from pipedejavu.planner.planning import choose_plans, known_machine, measure_setups, most_samples, profile_here
    from pipedejavu.planner.precision_choice import faster, is_worth_measuring, split_of, with_precision
    from pipedejavu.profile import TimeBudget
    from pipedejavu.source.chosen_data import data_choice
    from pipedejavu.source.precision import model_dtype
    from pipedejavu.source.trained_part import trained_part

    question = SearchOptions(
        batch=32 if request.batch is None else request.batch,
        samples=request.samples,
        clip="none" if options.clip_norm is None else "global",
        head_chunks=request.head_chunks,
    ).agreed()
    devices = request.device_choice
    with show_progress() as progress:
        machine = machine or known_machine()
        dtype = model_dtype(options)
        trains = [device for device in machine.devices if devices in ("auto", device.type)]
        chosen = with_precision(Plan(), options.asked_precision, trains, dtype=dtype)

        budget = TimeBudget(options.measure_budget_s)

        def measured(precision: Precision, *, is_sketch: bool = False) -> Profile:
            return profile_here(
                options.model, data_choice(options), question.batch, machine,
                lambda text: progress(budget.spent_share, text), renews=request.renew, part=trained_part(options),
                precision=precision, budget=budget, is_sketch=is_sketch,
            )  # fmt: skip

        if is_worth_measuring(chosen, options.asked_precision, trains):
            plain = measured(chosen.precision, is_sketch=True)
            split = measured(split_of(chosen.precision), is_sketch=True)
            samples = most_samples(question.batch, measure_setups(machine))
            chosen = faster(chosen, plain, split, samples)
        profile = measured(chosen.precision)
        clips = chosen.reduce.clip == "global"
        question = question.replace(precision=chosen.precision, clip="global" if clips else question.clip)
        plans: list[RankedPlan] = choose_plans(profile, machine, question, request.tries, devices, progress)
    best = plans[0] if len(plans) == 1 else find_fastest(options, plans, devices, print_error)
    if not request.as_json:
        print_error(f"plan: {best.bound}; forecast of the search {format_seconds(best.time_s)}")
    plan = best.plan.replace(decisions=(*best.plan.decisions, *chosen.decisions))
    return ChosenPlan(plan, None, best.machine, best.profile)


def choose_plan(request: TrainRequest, num_processes: int | None) -> Plan:
    """Reads the plan, for as many workers as there are processes if torchrun has started them."""
    plan = _read_sized(request, num_processes)
    if request.head_chunks is not None:
        plan = plan.replace(order=plan.order.replace(head_chunks=request.head_chunks))
    if request.flushed_updates is not None:
        plan = plan.replace(version=plan.version.replace(flushed_updates=request.flushed_updates))
    return plan if request.cpu_share is None else _with_cpu_share(plan, request.cpu_share)


def _read_sized(request: TrainRequest, num_processes: int | None) -> Plan:
    found = _data_parallel if request.plan == "auto" else partial(read_plan, request.plan, is_run=True)

    def read(sizes: Mapping[str, int | None]) -> Plan:
        return written_out(found(sizes))  # each device of a tensor-parallel group is a worker

    if num_processes is None or request.workers is not None:
        return read(request.sizes)
    for workers in range(1, num_processes + 1):
        with suppress(InputError):
            plan = read({**request.sizes, "workers": workers})
            if plan.num_workers == num_processes:
                return plan
    return read(request.sizes)


def _with_cpu_share(plan: Plan, share: float) -> Plan:
    """Returns the plan with a fixed fraction of each batch for its CPU replicas."""
    place, feed = plan.place, plan.feed
    if feed.kind != "share" or not place.cpu_replicas:
        raise InputError(
            f"plan '{plan.name}' shares no batch with CPU replicas; leave --cpu-share out, or use preset:coarse"
        )
    shares = ((1 - share) / place.replicas,) * place.replicas + (share / place.cpu_replicas,) * place.cpu_replicas
    return plan.replace(feed=feed.replace(shares=shares, is_controlled=False))


def _data_parallel(sizes: Mapping[str, int | None]) -> Plan:
    """Returns a data-parallel plan: a replica per GPU, or per core up to four if there is no GPU."""
    from pipedejavu.planner import num_gpus

    gpus = num_gpus()
    workers = sizes.get("workers") or gpus or min(4, max(2, num_cores()))
    plan = preset("ddp").at(
        workers=workers,
        trim=sizes.get("trim"),
        microbatches=sizes.get("microbatches") or 1,
        samples=sizes.get("samples") or 8,
    )
    reason = "a replica for each GPU" if gpus else "CPU workers of one host are alike; one for each core, four at most"
    return plan.replace(decisions=(Decision(axis="place", choice=f"{workers} replicas", reason=reason),))
