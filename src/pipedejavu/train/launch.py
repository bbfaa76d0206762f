"""`train`: plans a run on this machine, predicts it, starts its workers, and gathers what they leave."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessException, start_processes

from pipedejavu.engine import Applied, Log, Outcome, Read, audit, check_runnable
from pipedejavu.facts import InputError, Machine, Span, Timeline, WorkerSummary, write_file
from pipedejavu.plan import Plan
from pipedejavu.probe import read_shape
from pipedejavu.profile import measure_profile
from pipedejavu.program import Program, verify
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import Prediction, simulate
from pipedejavu.train.folder import RunFolder
from pipedejavu.train.options import TrainOptions
from pipedejavu.train.task import SampleOrder, make_job, make_task
from pipedejavu.train.worker import work


@dataclass(frozen=True)
class Trained:
    """A finished run: its folder, what was predicted and what was measured of one round of the program."""

    options: TrainOptions
    folder: RunFolder
    program: Program
    prediction: Prediction
    measured: Timeline
    outcome: Outcome


def plan_run(options: TrainOptions, plan: Plan, machine: Machine | None = None) -> tuple[TrainOptions, Program]:
    """Measures the model on this machine and compiles the plan for it.

    A plan whose workers do not wait for each other becomes one program over all steps; any other a program of
    one update, which the run repeats.
    """
    machine = machine or read_shape(plan.num_workers)
    cores = sum(host.cores for host in machine.hosts)
    options = options.but(num_threads=max(1, cores // plan.num_workers))
    plan = plan.but(steps=1 if plan.version.kind == "sync" else options.steps)
    if options.on_nan == "skip" and plan.version.kind != "sync":
        raise InputError(
            f"plan '{plan.name}' has no common moment to agree on leaving an update out; use --on-nan stop"
        )
    if (options.clip_norm is not None or options.on_nan == "skip") and plan.reduce.clip == "none":
        plan = plan.but(reduce=plan.reduce.but(clip="global"))
    torch.set_num_threads(options.num_threads)
    task = make_task(options)
    job = make_job(task, options)
    sample, target = task.data.batch(range(plan.feed.samples))
    kinds = {device.kind for device in machine.devices}
    if len(kinds) > 1:
        raise InputError(f"measuring several kinds of devices ({', '.join(sorted(kinds))}) is not built yet")
    profile = measure_profile(options.model, job.units, job.ties, sample, target, job.loss, kinds.pop())
    program = compile_plan(plan, profile, machine, fold=False)
    check_runnable(program)
    return options, program


def train(options: TrainOptions, program: Program, run_dir: str) -> Trained:
    """Runs a program to the end with a process for each worker; raises what the first of them to fail raised."""
    folder = RunFolder(run_dir)
    prediction = simulate(program, verify(program))
    folder.create(options, program)
    write_file(folder.predicted, prediction.timeline().to_json(indent=None))
    count = len(program.workers)
    _run_workers(folder, count)
    weights, parts = folder.read_parts(count)
    # A server's copy is the result where there is one; replicas are alike otherwise.
    center = program.num_replicas
    folder.write_model(weights, center if any(replica == center for _, replica in weights) else 0)
    measured = _timeline(program, parts)
    write_file(folder.measured, measured.to_json(indent=None))
    folder.remove_parts()
    logs = tuple(_log(part) for part in parts)
    return Trained(options, folder, program, prediction, measured, Outcome(weights, logs, ()))


def _run_workers(folder: RunFolder, count: int) -> None:
    """Starts a process for each worker and waits for all; whatever ends the wait ends them too."""
    context = start_processes(  # type: ignore[no-untyped-call]
        work, args=(count, str(folder.path)), nprocs=count, join=False, start_method="spawn"
    )
    try:
        while not context.join():
            pass
    except ProcessException:
        reason = folder.read_reason()
        if reason:
            raise InputError(reason) from None
        raise
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def audit_run(done: Trained) -> dict[str, float]:
    """Replays a run that kept its log; returns the largest difference of each parameter."""
    task = make_task(done.options)
    job = make_job(task, done.options)
    batches = SampleOrder(task.data, task, done.program.plan.feed.samples, done.options.seed)
    return audit(done.program, job, batches, done.outcome)


def _log(part: dict[str, Any]) -> Log:
    """Returns a worker's log from its JSON form."""
    events: list[Read | Applied] = []
    for kind, *fields in part.get("events", ()):
        if kind == "Read":
            events.append(Read(*fields))
        else:
            piece, replica, version, microbatches, coefficient = fields
            events.append(Applied(piece, replica, version, tuple(microbatches), coefficient))
    return Log(events=events)


def _timeline(program: Program, parts: list[dict[str, Any]]) -> Timeline:
    """Returns the spans of all workers' last round as a timeline."""
    spans = [Span(*span) for part in parts for span in part["spans"]]
    makespan = max(span.end_s for span in spans)
    workers, trainers = [], 0
    for index, part in enumerate(parts):
        busy = sum(s.end_s - s.start_s for s in spans if s.worker == index and s.lane == "compute")
        trainers += bool(program.held(index))
        workers.append(
            WorkerSummary(
                worker=index,
                device=program.devices[index],
                busy_s=busy,
                peak_bytes=part["peak_bytes"],
                peak_live_microbatches=part["peak_live"],
                weight_versions=part["peak_versions"],
            )
        )
    total = sum(w.busy_s for w in workers if program.held(w.worker))
    columns = zip(*spans, strict=True)
    return Timeline(
        origin="measured",
        makespan_s=makespan,
        bubble_fraction=1 - total / (makespan * trainers),
        workers=tuple(workers),
        **dict(zip(("worker", "lane", "action", "start_s", "end_s"), columns, strict=True)),
    )
