"""What the verb `train` was asked for, and the plan that it chooses for that."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from pipedejavu.cli.input_files import read_plan
from pipedejavu.cli.plan_command import show_progress
from pipedejavu.facts import InputError, Machine, Profile, format_seconds
from pipedejavu.facts.printable import print_error, tell
from pipedejavu.plan import Decision, Plan, preset
from pipedejavu.probe.machine_shape import num_cores
from pipedejavu.search import RankedPlan, SearchOptions

if TYPE_CHECKING:
    from pipedejavu.launch import RankGroup, Resumed
    from pipedejavu.planner.worker_host import WorkerHost
    from pipedejavu.run import TrainOptions


Devices = Literal["auto", "cpu", "gpu"]


@dataclass(frozen=True)
class TrainRequest:
    """What the user asked of a run beside its options."""

    plan: str
    sizes: Mapping[str, int | None]
    batch: int | None
    """Of an update, for a plan that is searched."""
    cpu_share: float | None
    machine: str | None
    devices: Devices
    run_dir: str | None
    resume: bool
    given: frozenset[str]
    """Parameters that were on the command line."""
    as_json: bool
    tries: int = 1
    """Of the plans that a search finds: how many run some updates, before the fastest of them is taken."""
    accept_changes: bool = False
    allow_restart: bool = False

    @property
    def has_plan(self) -> bool:
        """Whether anything was asked of the plan."""
        return not self.given.isdisjoint({"plan", "batch", "cpu_share", "machine", "devices", *self.sizes})


def choose(
    options: "TrainOptions",
    request: TrainRequest,
    ranks: "RankGroup",
    machine: Machine | None,
    resumed: "Resumed | None",
    worker_hosts: "Sequence[WorkerHost]",
) -> tuple[Plan, Profile | None, Machine | None]:
    """Returns the plan to train with, and what is known of the model and the machine under it."""
    from pipedejavu.launch import is_same_plan

    known = resumed.known if resumed else None
    processes = ranks.size if ranks.is_launched else None
    fits = known is not None and processes in (None, known.plan.num_workers)
    switch = known.switch if known and options.on_oom == "replan" else None
    if resumed and known and switch and switch.plan.num_workers == processes:
        resumed.folder.add_metrics(switch.row(known.plan.name, resumed.start.step))
        return switch.plan, switch.profile, switch.machine
    if known and fits and (not request.has_plan or (ranks.is_launched and request.plan == "auto")):
        chosen = known.plan
    elif resumed and known and processes and not fits and known.plan.version.kind == "sync":
        chosen = _fit(resumed, request, worker_hosts)
    elif is_searched(request, ranks.is_launched):
        chosen, machine = _search(options, request, machine)
    else:
        chosen = choose_plan(request, processes)
    if known and machine is None and is_same_plan(chosen, known.plan):
        return known.plan, known.profile, known.machine
    return chosen, None, machine


def _fit(resumed: "Resumed", request: TrainRequest, worker_hosts: "Sequence[WorkerHost]") -> Plan:
    """Returns a plan for the processes that torchrun started this time, and tells of it."""
    from pipedejavu.launch import fit_plan

    wanted = None
    if request.plan != "auto":
        with suppress(InputError):
            wanted = choose_plan(request, len(worker_hosts))
    assert resumed.known is not None
    before = resumed.known.plan
    found: Plan = fit_plan(resumed.known, wanted, worker_hosts, request.devices)
    counts = f"torchrun started {len(worker_hosts)} processes where the run had {before.num_workers} workers"
    reason = f"{counts}: it goes on under plan '{found.name}' with the same batch"
    tell(reason)
    row = {"switched": resumed.start.step, "before": before.name, "plan": found.name, "reason": reason}
    resumed.folder.add_metrics(row)
    return found


def is_searched(request: TrainRequest, is_launched: bool) -> bool:
    """Whether the planner is asked; raises InputError for options that are not for the plan that was asked for."""
    is_auto = request.plan == "auto" and not is_launched and request.sizes.get("workers") is None
    if not is_auto and request.batch is not None:
        raise InputError("--batch is for --plan auto, which chooses the workers; give --microbatches and --samples")
    if not is_auto and request.tries > 1:
        raise InputError(
            "--try is for --plan auto that chooses the workers itself; leave it out, or else --workers, other plans and"
            " torchrun"
        )
    if request.tries < 1:
        raise InputError(f"--try is a number of plans, 1 or more, not {request.tries}")
    if is_auto and request.sizes.get("trim") is not None:
        raise InputError("--trim is for plans that score contributions; use --plan preset:zeno")
    given = [name for name in ("replicas", "microbatches") if request.sizes.get(name) is not None]
    if is_auto and given:
        raise InputError(f"--plan auto chooses the {given[0]}; give --batch, or a plan with --plan preset:NAME")
    return is_auto


def _search(options: "TrainOptions", request: TrainRequest, machine: Machine | None) -> tuple[Plan, Machine]:
    """Returns the best plan that runs, and the machine that it is for."""
    from pipedejavu.launch import find_fastest
    from pipedejavu.planner.planning import choose_plans, known_machine, profile_here

    question = SearchOptions(
        batch=request.batch or 32,
        samples=request.sizes.get("samples"),
        clip="none" if options.clip_norm is None else "global",
    ).agreed()
    with show_progress() as progress:
        machine = machine or known_machine()

        def report(text: str) -> None:
            progress(0.0, text)

        profile = profile_here(options.model, options.data, question.batch, machine, report)
        plans: list[RankedPlan] = choose_plans(profile, machine, question, request.tries, request.devices, progress)
    found = plans[0] if len(plans) == 1 else find_fastest(options, plans, request.devices, print_error)
    if not request.as_json:
        print_error(f"plan: {found.bound}; forecast of the search {format_seconds(found.time_s)}")
    return found.plan, found.machine


def choose_plan(request: TrainRequest, processes: int | None) -> Plan:
    """Reads the plan, for as many workers as there are processes where they are started already."""
    plan = _read_sized(request, processes)
    return plan if request.cpu_share is None else _with_cpu_share(plan, request.cpu_share)


def _read_sized(request: TrainRequest, processes: int | None) -> Plan:
    read = _choose_simply if request.plan == "auto" else partial(read_plan, request.plan, is_run=True)
    if processes is None or request.sizes.get("workers") is not None:
        return read(request.sizes)
    for workers in range(1, processes + 1):
        with suppress(InputError):
            found = read({**request.sizes, "workers": workers})
            if found.num_workers == processes:
                return found
    return read(request.sizes)


def _with_cpu_share(plan: Plan, share: float) -> Plan:
    """Returns the plan with a fixed part of each batch for its CPU replicas."""
    place, feed = plan.place, plan.feed
    if feed.kind != "share" or not place.cpu_replicas:
        raise InputError(
            f"plan '{plan.name}' shares no batch with CPU replicas; leave --cpu-share out, or use preset:coarse"
        )
    if not 0 <= share <= 1:
        raise InputError(f"--cpu-share is a part of the batch between 0 and 1, not {share:g}")
    shares = ((1 - share) / place.replicas,) * place.replicas + (share / place.cpu_replicas,) * place.cpu_replicas
    return plan.replace(feed=feed.replace(shares=shares, is_controlled=False))


def _choose_simply(sizes: Mapping[str, int | None]) -> Plan:
    """Chooses a plan for workers that are given: data parallel over them."""
    from pipedejavu.planner import num_gpus

    gpus = num_gpus()
    workers = sizes.get("workers") or gpus or min(4, max(2, num_cores()))
    given = {"microbatches": sizes.get("microbatches") or 1, "samples": sizes.get("samples") or 8}
    plan = preset("ddp").at(workers=workers, trim=sizes.get("trim"), **given)
    reason = "a replica for each GPU" if gpus else "CPU workers of one host are alike; one for each core, four at most"
    return plan.replace(decisions=(Decision(axis="place", choice=f"{workers} replicas", reason=reason),))
