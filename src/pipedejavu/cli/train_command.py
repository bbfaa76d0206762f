"""The verb `train`: plans a run, trains, and prints the forecast beside the measurement."""

import json
import re
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from pipedejavu.cli.input_files import read_model
from pipedejavu.cli.installed import require_torch
from pipedejavu.cli.job_outlook import JobOutlook
from pipedejavu.cli.plan_choice import choose
from pipedejavu.cli.run_file import read_run_file, write_run_file
from pipedejavu.cli.run_outlook import describe_outlook
from pipedejavu.cli.run_result import write_report, write_result_folders
from pipedejavu.cli.show import show_cursor
from pipedejavu.cli.terminal import print_json, terminal
from pipedejavu.cli.train_request import DeviceOption, TrainRequest
from pipedejavu.facts import InputError, Machine, format_seconds, read_machine
from pipedejavu.facts.printable import print_error, tell
from pipedejavu.facts.start_phase import START, process_age_s
from pipedejavu.plan import Plan
from pipedejavu.program import Program
from pipedejavu.simulate import simulate

if TYPE_CHECKING:
    from pipedejavu.engine import Verdict
    from pipedejavu.launch import ChosenInit, RankGroup, Resumed, TrainedRun
    from pipedejavu.run import RunFolder, RunStart, TrainOptions

_EVALUATED = ("eval_loss", "perplexity", "accuracy")
"""Figures of an evaluation in a summary."""
MOVED = 74
"""The exit code of a run that finished but had to leave files elsewhere: EX_IOERR of sysexits.h."""


def read_options(request: TrainRequest) -> "TrainOptions":
    """Returns the run's options from the fields of a request; raises InputError with all faults."""
    require_torch("training")
    import torch

    from pipedejavu.run.options import MOST_STEPS, TrainOptions, default_rate

    form = {name: getattr(request, name) for name in TrainOptions.model_fields if hasattr(request, name)}
    form |= {"keeps_log": request.audit, "log": request.log or [], "replan": request.is_replanned}
    form["model"] = read_model(request.model)
    if request.deterministic is None:
        form["deterministic"] = request.devices == "cpu" or not torch.cuda.is_available()
    if request.lr is None:
        form["lr"] = default_rate(is_pretrained=request.weights is not None, has_adapters=request.lora is not None)
    if request.epochs is not None:
        form["steps"] = MOST_STEPS
    check_together(request)
    return TrainOptions.from_json(json.dumps(form), source="the options of train")


def check_together(request: TrainRequest) -> None:
    """Raises InputError for options that exclude each other."""
    if request.epochs is not None and "steps" in request.explicit:
        raise InputError(f"--epochs {request.epochs} and --steps {request.steps} both say how long to train; give one")
    if request.accumulate is not None and request.microbatches is not None:
        raise InputError("--accumulate and --microbatches are two names of one number; give one of them")
    if request.eval_every is not None and not (request.eval or request.eval_data or request.resume):
        raise InputError("--eval-every says how often to evaluate, and there is nothing to; add --eval or --eval-data")


def run(request: TrainRequest) -> None:
    """Trains, and prints the forecast beside the measurement."""
    START.restart()
    START.add("import", process_age_s())
    request = read_run_file(request)
    options = read_options(request)
    try:
        _run_ranks(options, request)
    finally:
        show_cursor()


def _run_ranks(options: "TrainOptions", request: TrainRequest) -> None:
    """Trains on this rank, and ends its process with the exit code and the message of a failure."""
    from pipedejavu.health import WorkerError
    from pipedejavu.launch import RankGroup
    from pipedejavu.run import StoppedError

    ranks = RankGroup.join()
    try:
        _run(options, request, ranks)
    except WorkerError as error:
        trace, _, sentence = str(error).rpartition("\n")
        ranks.tell("\n".join(filter(None, (trace, f"pipedejavu: {sentence}"))))
        ranks.leave(SystemExit(1))
        raise SystemExit(1) from None
    except StoppedError as error:
        if ranks.is_first:
            tell(error)
        ranks.leave(SystemExit(128 + error.number))
        raise SystemExit(128 + error.number) from None
    except BaseException as error:
        ranks.leave(error)
        raise
    ranks.leave()


def _run(options: "TrainOptions", request: TrainRequest, ranks: "RankGroup") -> None:
    from pipedejavu.run import RunFolder, lock_run

    if request.devices not in get_args(DeviceOption):
        raise InputError(f"--devices is auto, cpu, gpu or shared-gpu, not '{request.devices}'")
    # Only the first rank reads files; it sends their content to the others.
    machine = read_machine(request.machine) if request.machine and ranks.is_first else None
    with ExitStack() as stack:
        if ranks.is_first and request.run_dir is not None:
            stack.enter_context(lock_run(request.run_dir))
            if not request.resume:
                RunFolder(request.run_dir).check_new()
        resumed = _reopen(request, ranks) if request.resume else None
        if ranks.is_first and resumed:
            options = resumed.options(options, request.explicit, is_launched=ranks.is_launched)
            if request.audit:
                tell("--audit replays a run from its beginning, and this one goes on: there will be no audit")
        if resumed and ranks.broadcast(b"1" if ranks.is_first and resumed.is_done(options) else b""):
            if ranks.is_first:
                _print_done(resumed, options, request.as_json)
            return
        if ranks.is_first and resumed:
            tell(resumed)
        _train(options, request, ranks, machine, resumed, stack)


def _train(
    options: "TrainOptions",
    request: TrainRequest,
    ranks: "RankGroup",
    machine: Machine | None,
    resumed: "Resumed | None",
    stack: ExitStack,
) -> None:
    """Plans a run, or the rest of it, and trains; `stack` keeps the run folder locked."""
    from pipedejavu.data.data_choice import check_choice
    from pipedejavu.engine.device import deterministic
    from pipedejavu.launch import plan_run, train_rank
    from pipedejavu.run import RunFolder, check_logbooks, lock_run
    from pipedejavu.source.chosen_data import data_choice
    from pipedejavu.source.hub_data import fetch_data
    from pipedejavu.source.model_source import check_sources
    from pipedejavu.source.task import Prepared

    # Units are measured, and compiled, in the mode in which they will run.
    stack.enter_context(deterministic(is_on=options.deterministic))
    start, profile, eager = resumed.start if resumed else None, None, None
    chosen, worker_hosts, prepared = Plan(), ranks.worker_hosts(), list[Prepared]()
    if ranks.is_first:
        check_logbooks(options.log)
        fetch_data(data_choice(options))
        check_choice(data_choice(options))
        if not (start and start.step):
            check_sources(options)
        chosen, profile, machine, eager = choose(options, request, ranks, machine, resumed, worker_hosts)
    folder = request.run_dir or _new_name(f"{options.model}-{chosen.name}")
    if ranks.is_first:
        stack.enter_context(lock_run(folder))
    plan = partial(plan_run, devices=request.device_choice, ranks=ranks, renews=request.renew, prepared=prepared)
    options, program, note = plan(options, chosen, machine, start=start, profile=profile, eager=eager)
    outlook = JobOutlook.on_first(options, program, start, ranks)
    if outlook and not request.as_json:
        _announce(options, note, outlook)
    if options.init_candidates > 1 and not (start and start.step):
        start = _choose_candidate(options, program, folder, ranks, start)
        options, program, _ = plan(options, program.plan, program.machine, start=start, profile=program.profile)
        outlook = JobOutlook.on_first(options, program, start, ranks)
    if ranks.is_first and not resumed:
        write_run_file(request, Path(folder))
    if outlook:
        outlook.begin(RunFolder(folder))
    try:
        done = train_rank(options, program, folder, ranks, start, prepared[-1] if prepared else None)
    except KeyboardInterrupt:
        print_error(f"stopped; the metrics so far are in {folder}")
        raise SystemExit(130) from None
    if done is not None:
        assert outlook
        outlook.end(done.folder)
        _conclude(done, options, request.as_json)
        if moved := done.folder.fallback.describe():
            tell(moved)
            raise SystemExit(MOVED)


def _new_name(run: str) -> str:
    """Returns the name of a new folder for a run without `--run-dir`."""
    plain = re.sub(r"[^\w.-]+", "-", run)
    name = f"runs/{plain}-{time.strftime('%Y%m%d-%H%M%S')}"
    others = (f"{name}-{number}" for number in count(2))
    return next(path for path in chain((name,), others) if not Path(path).exists())


def _choose_candidate(
    options: "TrainOptions", program: Program, folder: str, ranks: "RankGroup", start: "RunStart | None"
) -> "RunStart":
    from pipedejavu.launch import choose_init

    chosen: ChosenInit = choose_init(options, program, folder, ranks, start)
    if ranks.is_first:
        print_error(
            f"candidate {chosen.winner} of {options.init_candidates} goes on after step {chosen.start.step}; together"
            f" they made {sum(chosen.updates)} updates on {chosen.samples} samples"
        )
    return chosen.start


def _reopen(request: TrainRequest, ranks: "RankGroup") -> "Resumed | None":
    from pipedejavu.launch import reopen

    if request.run_dir is None:
        raise InputError("--resume goes on with the run in a folder; say which one with --run-dir")
    return reopen(
        request.run_dir, ranks, tell, accept_changes=request.accept_changes, allow_restart=request.allow_restart
    )


def _print_done(resumed: "Resumed", options: "TrainOptions", as_json: bool) -> None:
    """Says that a run has made all its steps; this is not an error, so that scripts which resume runs can end."""
    tell(
        f"nothing left to do: the run in {resumed.folder.path} has made {resumed.start.step} of its {options.steps}"
        " steps; --steps asks for more"
    )
    if as_json:
        print_json(_summary_of(resumed.folder))


def _announce(options: "TrainOptions", note: str, outlook: JobOutlook) -> None:
    program = outlook.prediction.program
    axes = "  ".join(f"{axis}={text}" for axis, text in program.plan.axes().items())
    print_error(f"{options.model} with plan {program.plan.name}: {axes}")
    devices = (program.machine.device(name) for name in program.devices)
    print_error(f"workers on {', '.join(f'{d.name} ({d.kind})' for d in devices)}")
    print_error(_describe_update(program))
    for decision in program.plan.decisions:
        print_error(f"{decision.axis}: {decision.choice} ({decision.reason})")
    if note:
        print_error(note)
    for sentence in describe_outlook(options, outlook):
        print_error(sentence)


def _describe_update(program: Program) -> str:
    """Returns a sentence on the samples per update; the sizes on the command line are per pipeline or replica."""
    feed, replicas = program.plan.feed, program.num_replicas
    if feed.is_own:
        return f"each of {replicas} replicas makes updates of its own, of {feed.microbatches} × {feed.samples} samples"
    spread = f" over {replicas} replicas" if replicas > 1 else ""
    return f"an update has {sum(program.sizes)} samples in {program.update_size} microbatches{spread}"


def _conclude(done: "TrainedRun", options: "TrainOptions", as_json: bool) -> None:
    from pipedejavu.launch import judge_run

    verdict: Verdict | None = judge_run(done) if options.keeps_log else None
    write_report(done, options, verdict)
    summary = _summary(done) | write_result_folders(done, options)
    if verdict is not None:
        summary["audit"] = verdict.to_dict()
    if as_json:
        print_json(summary)
    else:
        _print_summary(summary, done, verdict)
    if verdict is not None and not verdict.is_passed:
        tell(f"{verdict}; do not use these weights")
        raise SystemExit(1)


@dataclass(frozen=True)
class _Metrics:
    first_loss: float | None
    last_loss: float | None
    steps: int
    skipped: int
    elapsed_s: float
    evaluation: Mapping[str, float]
    """The figures of the last evaluation; empty without one."""


def _read_metrics(folder: "RunFolder") -> _Metrics:
    from pipedejavu.run import History

    run: History = History.read(folder)
    evaluation = run.evaluations[-1].figures() if run.evaluations else {}
    if not run.steps:  # a disk that was full has taken none
        return _Metrics(None, None, 0, run.num_skipped, 0.0, evaluation)
    first, last = run.steps[0], run.steps[-1]
    return _Metrics(first.loss, last.loss, last.step, run.num_skipped, last.elapsed_s, evaluation)


def _summary(done: "TrainedRun") -> dict[str, object]:
    folder = done.folder
    metrics = _read_metrics(folder)
    return {
        "run_dir": str(folder.path),
        "steps": metrics.steps,
        "steps_skipped": metrics.skipped,
        "first_loss": metrics.first_loss,
        "last_loss": metrics.last_loss,
        **metrics.evaluation,
        "elapsed_s": metrics.elapsed_s,
        "predicted_s": done.prediction.makespan_s,
        "expected_s": done.prediction.chance.mean_s,
        "measured_s": done.measured.makespan_s,
        "predicted_reserved_bytes": max(worker.reserved_bytes or 0 for worker in done.prediction.workers),
        "predicted_bubble_fraction": done.prediction.bubble_fraction,
        "measured_bubble_fraction": done.measured.bubble_fraction,
        "model": str(folder.place(folder.model)),
        "report": str(folder.place(folder.report)),
    }


def _summary_of(folder: "RunFolder") -> dict[str, object]:
    """Returns the summary of a run that was already finished, from its folder; None for figures that are missing."""
    from pipedejavu.run import History

    run: History = History.read(folder.path)
    predicted, measured = run.predicted, folder.timeline("measured") if folder.measured.exists() else None
    steps = run.steps
    return {
        "run_dir": str(folder.path),
        "steps": steps[-1].step if steps else max(folder.checkpoint_dir.steps(), default=0),
        "first_loss": steps[0].loss if steps else None,
        "last_loss": steps[-1].loss if steps else None,
        "elapsed_s": steps[-1].elapsed_s if steps else None,
        "predicted_s": predicted.makespan_s if predicted else None,
        "expected_s": simulate(folder.program()).chance.mean_s,
        "measured_s": measured.makespan_s if measured else None,
        "predicted_bubble_fraction": predicted.bubble_fraction if predicted else None,
        "measured_bubble_fraction": measured.bubble_fraction if measured else None,
        "model": str(folder.model),
        "report": str(folder.report),
    }


def _print_summary(summary: Mapping[str, object], done: "TrainedRun", verdict: "Verdict | None") -> None:
    from pipedejavu.run import describe_figures

    console = terminal(soft_wrap=True)
    console.print(
        f"loss {_loss(summary, 'first_loss')} → {_loss(summary, 'last_loss')} in {summary['steps']} steps,"
        f" {format_seconds(float(str(summary['elapsed_s'])))}"
    )
    if evaluation := {name: value for name in _EVALUATED if isinstance(value := summary.get(name), float)}:
        console.print(f"evaluation: {describe_figures(evaluation)}")
    if summary["steps_skipped"]:
        console.print(f"updates left out: {summary['steps_skipped']}; the report says which and why")
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
    if verdict is not None:
        console.print(str(verdict))
        for name, difference in sorted(verdict.differences.items(), key=lambda item: -item[1])[:5]:
            console.print(f"  {name}: {difference:.3g}, rounding {verdict.tolerances[name]:.3g}")
    console.print(f"weights in {summary['model']}, report in {summary['report']}")
    if "pretrained" in summary:
        console.print(f"from_pretrained opens {summary['pretrained']}")
    if "adapter" in summary:
        console.print(f"the adapters alone, for peft, are in {summary['adapter']}")
    if isinstance(sample := summary.get("sample"), dict):
        console.print(f"the model now continues {sample['prompt']!r} with {sample['text']!r}", markup=False)


def _loss(summary: Mapping[str, object], name: str) -> str:
    value = summary[name]
    if isinstance(value, float):
        return f"{value:.4f}"
    return "not finite" if summary["steps"] else "unknown"


def _on_average(done: "TrainedRun") -> str:
    chance = done.prediction.chance
    return f" ({format_seconds(chance.mean_s)} on average)" if chance.varies else ""
