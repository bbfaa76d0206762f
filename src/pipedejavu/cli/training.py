"""The verb `train`."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from pipedejavu.cli.planning import show_progress
from pipedejavu.cli.room import training_room as _room
from pipedejavu.cli.source import read_model, read_plan
from pipedejavu.cli.terminal import print_json, terminal
from pipedejavu.facts import InputError, Machine, format_seconds, read_machine, write_file
from pipedejavu.facts.printable import print_error, tell
from pipedejavu.plan import Decision, Plan, preset
from pipedejavu.probe.shape import num_cores
from pipedejavu.program import Program
from pipedejavu.report import Story, render_html
from pipedejavu.search import Candidate, Options

if TYPE_CHECKING:
    from pipedejavu.train import Chosen, History, Resumed, Start, Team, Trained, TrainOptions
    from pipedejavu.train.site import Site


def read_options(model: str, given: Mapping[str, object]) -> "TrainOptions":
    """Returns the run's options, those of `given` that are; raises InputError with every fault."""
    kind = _room().TrainOptions
    own = {name: value for name, value in given.items() if name in kind.model_fields}
    found: TrainOptions = kind.from_json(json.dumps({**own, "model": read_model(model)}), source="the options of train")
    return found


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

    @property
    def has_plan(self) -> bool:
        """Whether anything was asked of the plan."""
        return not self.given.isdisjoint({"plan", "batch", "cpu_share", "machine", "devices", *self.sizes})


def run(options: "TrainOptions", asked: Asked) -> None:
    """Trains, and prints the forecast beside what happened."""
    team = _room().Team.join()
    try:
        _run(options, asked, team)
    except _room().WorkerError as error:
        trace, _, sentence = str(error).rpartition("\n")
        print_error(f"{trace}\npipedejavu: {sentence}" if trace else f"pipedejavu: {sentence}")
        team.leave(SystemExit(1))
        raise SystemExit(1) from None
    except _room().StoppedError as error:
        if team.is_first:
            tell(error)
        team.leave(SystemExit(143))
        raise SystemExit(143) from None
    except BaseException as error:
        team.leave(error)
        raise
    team.leave()


def _run(options: "TrainOptions", asked: Asked, team: "Team") -> None:
    room = _room()
    if asked.devices not in ("auto", "cpu", "gpu"):
        raise InputError(f"--devices is auto, cpu or gpu, not '{asked.devices}'")
    # Files are read by the first rank, which gives their content to the others.
    machine = read_machine(asked.machine) if asked.machine and team.is_first else None
    steps = options.steps if "steps" in asked.given else None
    resumed = _reopen(asked, team, steps) if asked.resume else None
    start, profile = resumed.start if resumed else None, None
    chosen, sites = Plan(), team.sites()
    if team.is_first:
        known = resumed.known if resumed else None
        options = resumed.options(options, asked.given) if resumed else options
        room.check_logbooks(options.log)
        processes = team.size if team.is_launched else None
        fits = known is not None and processes in (None, known.plan.num_workers)
        switch = known.switch if known and options.on_oom == "replan" else None
        if resumed and known and switch and switch.plan.num_workers == processes:
            chosen, profile, machine = switch.plan, switch.profile, switch.machine
            resumed.folder.add_metrics(switch.row(known.plan.name, resumed.start.step))
        elif known and fits and (not asked.has_plan or (team.is_launched and asked.plan == "auto")):
            chosen = known.plan
        elif resumed and known and processes and not fits and known.plan.version.kind == "sync":
            chosen = _fit(resumed, asked, sites)
        elif is_searched(asked, team.is_launched):
            chosen, machine = _search(options, asked, machine)
        else:
            chosen = choose_plan(asked, processes)
        if known and machine is None and room.is_same_plan(chosen, known.plan):
            chosen, profile, machine = known.plan, known.profile, known.machine
    settings = {"devices": asked.devices, "team": team, "start": start, "profile": profile}
    options, program, note = room.plan_run(options, chosen, machine, **settings)
    name = re.sub(r"[^\w.-]+", "-", f"{options.model}-{chosen.name}")
    folder = asked.run_dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if team.is_first and not asked.as_json:
        _announce(options, program, note)
    if options.init_candidates > 1 and not (start and start.step):
        start = _choose_candidate(options, program, folder, team, start)
        settings |= {"start": start, "profile": program.profile}
        options, program, _ = room.plan_run(options, program.plan, program.machine, **settings)
    try:
        begun = (options, program, folder)
        done = room.train_rank(*begun, team, start) if team.is_launched else room.train(*begun, start)
    except KeyboardInterrupt:
        print_error(f"stopped; the metrics so far are in {folder}")
        raise SystemExit(130) from None
    if done is not None:
        _conclude(done, options, asked.as_json)


def _choose_candidate(
    options: "TrainOptions", program: Program, folder: str, team: "Team", start: "Start | None"
) -> "Start":
    found: Chosen = _room().choose_candidate(options, program, folder, team, start)
    if team.is_first:
        print_error(
            f"candidate {found.winner} of {options.init_candidates} goes on behind step {found.start.step}; together"
            f" they made {sum(found.updates)} updates on {found.samples} samples"
        )
    return found.start


def _reopen(asked: Asked, team: "Team", steps: int | None) -> "Resumed | None":
    if asked.run_dir is None:
        raise InputError("--resume goes on with the run in a folder; say which one with --run-dir")
    found: Resumed | None = _room().reopen(asked.run_dir, team, tell, steps)
    return found


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


def _announce(options: "TrainOptions", program: Program, note: str) -> None:
    axes = "  ".join(f"{axis}={text}" for axis, text in program.plan.axes().items())
    print_error(f"{options.model} with plan {program.plan.name}: {axes}")
    devices = (program.machine.device(name) for name in program.devices)
    print_error(f"workers on {', '.join(f'{d.name} ({d.kind})' for d in devices)}")
    for decision in program.plan.decisions:
        print_error(f"{decision.axis}: {decision.choice} ({decision.reason})")
    if note:
        print_error(note)


def _conclude(done: "Trained", options: "TrainOptions", as_json: bool) -> None:
    _write_report(done, options)
    summary = _summary(done)
    if options.keeps_log:
        differences = _room().audit_run(done)
        summary["audit"] = {"largest_difference": max(differences.values()), "differences": differences}
    if as_json:
        print_json(summary)
        return
    _print_summary(summary, done)


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
    read = _choose_simply if asked.plan == "auto" else partial(read_plan, asked.plan)
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


@dataclass(frozen=True)
class _Metrics:
    first_loss: float | None
    last_loss: float | None
    steps: int
    elapsed_s: float


def _read_metrics(path: Path) -> _Metrics:
    steps = _room().History.read(path).steps
    if not steps:  # a disk that was full has taken none
        return _Metrics(None, None, 0, 0.0)
    return _Metrics(steps[0].loss, steps[-1].loss, steps[-1].step, steps[-1].elapsed_s)


def _summary(done: "Trained") -> dict[str, object]:
    metrics = _read_metrics(done.folder.path)
    return {
        "run_dir": str(done.folder.path),
        "steps": metrics.steps,
        "first_loss": metrics.first_loss,
        "last_loss": metrics.last_loss,
        "elapsed_s": metrics.elapsed_s,
        "predicted_s": done.prediction.makespan_s,
        "expected_s": done.prediction.chance.mean_s,
        "measured_s": done.measured.makespan_s,
        "predicted_bubble_fraction": done.prediction.bubble_fraction,
        "measured_bubble_fraction": done.measured.bubble_fraction,
        "model": str(done.folder.model),
        "report": str(done.folder.report),
    }


def _print_summary(summary: Mapping[str, object], done: "Trained") -> None:
    console = terminal(soft_wrap=True)
    console.print(
        f"loss {_loss(summary['first_loss'])} → {_loss(summary['last_loss'])} in {summary['steps']} steps,"
        f" {format_seconds(float(str(summary['elapsed_s'])))}"
    )
    steps = done.program.plan.steps
    unit = "an update" if steps == 1 else f"{steps} updates"
    console.print(
        f"forecast of {unit}: {format_seconds(done.prediction.makespan_s)}{_on_average(done)},"
        f" bubble {done.prediction.bubble_fraction:.1%}; measured in the last round:"
        f" {format_seconds(done.measured.makespan_s)}, bubble {done.measured.bubble_fraction:.1%}"
    )
    if done.moves:
        moved = " + ".join(str(sum(part)) for part in done.moves[-1][1])
        console.print(f"shares moved to {moved} samples while it ran; both figures are of the last round")
    if "audit" in summary:
        audit = summary["audit"]
        assert isinstance(audit, dict)
        console.print(f"audit: the float64 replay differs by {audit['largest_difference']:.3g} at most")
        for name, difference in sorted(audit["differences"].items(), key=lambda item: -item[1])[:5]:
            console.print(f"  {name}: {difference:.3g}")
    console.print(f"weights in {done.folder.model}, report in {done.folder.report}")


def _loss(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "unknown"


def _on_average(done: "Trained") -> str:
    chance = done.prediction.chance
    return f" ({format_seconds(chance.mean_s)} on average)" if chance.varies else ""


def _write_report(done: "Trained", options: "TrainOptions") -> None:
    plan = done.program.plan
    decisions = [(d.axis, d.choice, d.reason) for d in plan.decisions]
    notes = [f"The timelines are of one round: the last of {options.steps} steps, and its forecast."]
    title = f"{plan.name} · {options.model}, measured"
    rate = sum(done.program.sizes) * plan.steps / done.prediction.makespan_s if done.prediction.makespan_s else None
    run: History = _room().History.read(done.folder.path)
    losses = [(step.step, step.loss) for step in run.steps]
    rates = [(step, samples / time_s) for step, samples, time_s in run.rates()]
    page = render_html(
        done.measured, title, plan.axes(), decisions, notes,
        forecast=done.prediction.timeline(), story=Story(losses, rates, rate, run.events),
    )  # fmt: skip
    write_file(done.folder.report, page)
