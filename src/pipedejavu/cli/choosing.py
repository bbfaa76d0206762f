"""What the verb `train` was asked for, and the plan that it chooses for that."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from pipedejavu.cli.planning import show_progress
from pipedejavu.cli.room import training_room as _room
from pipedejavu.cli.source import read_plan
from pipedejavu.facts import InputError, Machine, Profile, format_seconds
from pipedejavu.facts.printable import print_error, tell
from pipedejavu.plan import Decision, Plan, preset
from pipedejavu.probe.shape import num_cores
from pipedejavu.search import Candidate, Options

if TYPE_CHECKING:
    from pipedejavu.train import Resumed, Team, TrainOptions
    from pipedejavu.train.site import Site


@dataclass(frozen=True)
class Asked:
    """What the user asked of a run beside its options."""

    plan: str
    sizes: Mapping[str, int | None]
    batch: int | None
    """Of an update, for a plan that is searched."""
    cpu_share: float | None
    machine: str | None
    devices: str
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
    asked: Asked,
    team: "Team",
    machine: Machine | None,
    resumed: "Resumed | None",
    sites: "Sequence[Site]",
) -> tuple[Plan, Profile | None, Machine | None]:
    """Returns the plan to train with, and what is known of the model and the machine under it."""
    known = resumed.known if resumed else None
    processes = team.size if team.is_launched else None
    fits = known is not None and processes in (None, known.plan.num_workers)
    switch = known.switch if known and options.on_oom == "replan" else None
    if resumed and known and switch and switch.plan.num_workers == processes:
        resumed.folder.add_metrics(switch.row(known.plan.name, resumed.start.step))
        return switch.plan, switch.profile, switch.machine
    if known and fits and (not asked.has_plan or (team.is_launched and asked.plan == "auto")):
        chosen = known.plan
    elif resumed and known and processes and not fits and known.plan.version.kind == "sync":
        chosen = _fit(resumed, asked, sites)
    elif is_searched(asked, team.is_launched):
        chosen, machine = _search(options, asked, machine)
    else:
        chosen = choose_plan(asked, processes)
    if known and machine is None and _room().is_same_plan(chosen, known.plan):
        return known.plan, known.profile, known.machine
    return chosen, None, machine


def _fit(resumed: "Resumed", asked: Asked, sites: "Sequence[Site]") -> Plan:
    """Returns a plan for the processes that torchrun started this time, and tells of it."""
    wanted = None
    if asked.plan != "auto":
        with suppress(InputError):
            wanted = choose_plan(asked, len(sites))
    assert resumed.known is not None
    before = resumed.known.plan
    found: Plan = _room().fit_plan(resumed.known, wanted, sites, asked.devices)
    counts = f"torchrun started {len(sites)} processes where the run had {before.num_workers} workers"
    reason = f"{counts}: it goes on under plan '{found.name}' with the same batch"
    tell(reason)
    row = {"switched": resumed.start.step, "before": before.name, "plan": found.name, "reason": reason}
    resumed.folder.add_metrics(row)
    return found


def is_searched(asked: Asked, is_launched: bool) -> bool:
    """Whether the planner is asked; raises InputError for options that are not for the plan that was asked for."""
    is_auto = asked.plan == "auto" and not is_launched and asked.sizes.get("workers") is None
    if not is_auto and asked.batch is not None:
        raise InputError("--batch is for --plan auto, which chooses the workers; give --microbatches and --samples")
    if not is_auto and asked.tries > 1:
        raise InputError(
            "--try is for --plan auto that chooses the workers itself; leave it out, or else --workers, other plans and"
            " torchrun"
        )
    if asked.tries < 1:
        raise InputError(f"--try is a number of plans, 1 or more, not {asked.tries}")
    if is_auto and asked.sizes.get("trim") is not None:
        raise InputError("--trim is for plans that score contributions; use --plan preset:zeno")
    given = [name for name in ("replicas", "microbatches") if asked.sizes.get(name) is not None]
    if is_auto and given:
        raise InputError(f"--plan auto chooses the {given[0]}; give --batch, or a plan with --plan preset:NAME")
    return is_auto


def _search(options: "TrainOptions", asked: Asked, machine: Machine | None) -> tuple[Plan, Machine]:
    """Returns the best plan that runs, and the machine that it is for."""
    room = import_module("pipedejavu.train.planning")
    question = Options(
        batch=asked.batch or 32,
        samples=asked.sizes.get("samples"),
        clip="none" if options.clip_norm is None else "global",
    ).agreed()
    with show_progress() as progress:
        machine = machine or room.known_machine()

        def report(text: str) -> None:
            progress(0.0, text)

        profile = room.profile_here(options.model, options.data, question.batch, machine, report)
        plans: list[Candidate] = room.choose_plans(profile, machine, question, asked.tries, asked.devices, progress)
    found = plans[0] if len(plans) == 1 else _room().find_fastest(options, plans, asked.devices, print_error)
    if not asked.as_json:
        print_error(f"plan: {found.bound}; forecast of the search {format_seconds(found.time_s)}")
    return found.plan, found.machine


def choose_plan(asked: Asked, processes: int | None) -> Plan:
    """Reads the plan, for as many workers as there are processes where they are started already."""
    plan = _read_sized(asked, processes)
    return plan if asked.cpu_share is None else _with_cpu_share(plan, asked.cpu_share)


def _read_sized(asked: Asked, processes: int | None) -> Plan:
    read = _choose_simply if asked.plan == "auto" else partial(read_plan, asked.plan, is_run=True)
    if processes is None or asked.sizes.get("workers") is not None:
        return read(asked.sizes)
    for workers in range(1, processes + 1):
        with suppress(InputError):
            found = read({**asked.sizes, "workers": workers})
            if found.num_workers == processes:
                return found
    return read(asked.sizes)


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
    return plan.but(feed=feed.but(shares=shares, is_controlled=False))


def _choose_simply(sizes: Mapping[str, int | None]) -> Plan:
    """Chooses a plan for workers that are given: data parallel over them."""
    gpus = _room().num_gpus()
    workers = sizes.get("workers") or gpus or min(4, max(2, num_cores()))
    given = {"microbatches": sizes.get("microbatches") or 1, "samples": sizes.get("samples") or 8}
    plan = preset("ddp").at(workers=workers, trim=sizes.get("trim"), **given)
    reason = "a replica for each GPU" if gpus else "CPU workers of one host are alike; one for each core, four at most"
    return plan.but(decisions=(Decision(axis="place", choice=f"{workers} replicas", reason=reason),))
