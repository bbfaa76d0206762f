"""The verb `schedule`: reads a queue of jobs and a cluster, plans each job, simulates policies, and prints them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from pipedejavu.cli.input_files import AsJson, read_model
from pipedejavu.cli.installed import require_torch
from pipedejavu.cli.plan_command import MEASURING, show_progress
from pipedejavu.cli.queue_command import run_queue
from pipedejavu.cli.terminal import print_json, terminal
from pipedejavu.cluster import (
    ClusterCourse,
    ClusterJob,
    ScheduleOptions,
    ScheduleSummary,
    Server,
    outcomes,
    servers_of,
    simulate_cluster,
    summarise,
)
from pipedejavu.cluster.job_file import read_jobs, read_rates, read_servers
from pipedejavu.cluster.schedule_page import render_schedule
from pipedejavu.cluster.sensitivity import plan_rates
from pipedejavu.facts import (
    InputError,
    Machine,
    Profile,
    format_seconds,
    nearest,
    read_machine,
    read_profile,
    write_file,
)
from pipedejavu.facts.published import PUBLISHED
from pipedejavu.search import Progress
from pipedejavu.zoo import estimate_profile


@dataclass(frozen=True)
class ScheduleRequest:
    """The arguments and options of `schedule`."""

    jobs: Annotated[
        str,
        typer.Argument(metavar="JOBS", help="Jobs as JSON or CSV, or a trace: openb's tasks, Synergy's 100 jobs."),
    ]
    machine: Annotated[
        str | None,
        typer.Option(
            help="A machine or cluster file, a text such as '4x(8xv100 + 2xepyc-7763), 100Gb/s', or openb's nodes."
        ),
    ] = None
    is_run: Annotated[bool, typer.Option("--run", help="Train the jobs on this host's devices.")] = False
    out: Annotated[str, typer.Option(help="Folder of the queue; a queue that is there already is continued.")] = "queue"
    ray: Annotated[
        str | None, typer.Option(help="With --run: train on the nodes of the Ray cluster at this address, or 'auto'.")
    ] = None
    rates: Annotated[
        str | None, typer.Option(help="A CSV of updates per second by model and resources, in place of plans.")
    ] = None
    policy: Annotated[
        list[str] | None, typer.Option(help="fifo, srtf, las, deadline or max-min; repeat it to compare several.")
    ] = None
    allocation: Annotated[
        str, typer.Option(help="Cores and memory per GPU: proportional, or tuned to each job's table.")
    ] = "proportional"
    packing: Annotated[str, typer.Option(help="Server for a job: first, best, spread or fragments.")] = "best"
    backfill: Annotated[bool, typer.Option(help="Let a job that fits pass those before it that do not.")] = False
    round_s: Annotated[float, typer.Option("--round", help="Seconds between preemptions.")] = 300.0
    start_s: Annotated[float, typer.Option("--start", help="Seconds to start a job's processes.")] = 10.0
    disk: Annotated[float, typer.Option(help="Bytes per second at which checkpoints are written and read.")] = 1e9
    price: Annotated[
        list[str] | None, typer.Option(help="Price per hour of a kind of device, such as v100=2.5; may be repeated.")
    ] = None
    rent: Annotated[
        list[str] | None,
        typer.Option(
            help="Servers to rent when jobs wait, with their price per hour each: '4x(8xa100 + epyc-7763)@20'."
        ),
    ] = None
    plan_budget: Annotated[float, typer.Option(help="Seconds for each search of a plan.")] = 5.0
    html: Annotated[str | None, typer.Option(help="Write the page of the first policy to this file.")] = None
    as_json: AsJson = False
    explicit: frozenset[str] = frozenset()
    """Names of the fields that were on the command line."""


def run(request: ScheduleRequest) -> None:
    """Simulates each policy, or runs the jobs under one, and prints or writes what came out."""
    names = request.policy or ["fifo"]
    options = [_options(request, name) for name in names]
    if "out" in request.explicit and not request.is_run:
        raise InputError("--out is the folder of a queue that is run; add --run, or write the page with --html")
    if request.ray is not None and not request.is_run:
        raise InputError("--ray says on which nodes a queue is run; add --run")
    jobs = read_jobs(request.jobs)
    if request.is_run:
        check_run(request)
        run_queue(jobs, options[0], request.out, request.html, request.as_json, request.ray)
        return
    with show_progress() as progress:
        servers, machine = _read_cluster(request)
        jobs = with_rates(jobs, request, machine, progress)
        courses = [simulate_cluster(jobs, servers, option) for option in options]
    if request.html:
        title = f"{len(jobs):,} jobs of {Path(request.jobs).name}, {names[0]}, {request.allocation}"
        write_file(request.html, render_schedule(courses[0], title))
    if request.as_json:
        print_json(
            {"schedules": [_form(course) for course in courses], "files": [request.html] if request.html else []}
        )
        return
    _print([summarise(course) for course in courses])
    if request.html:
        terminal(soft_wrap=True).print(f"wrote {request.html}")


def check_run(request: ScheduleRequest) -> None:
    """Raises InputError for options that concern a simulation alone."""
    simulated = ("machine", "rates", "allocation", "price", "rent", "plan_budget")
    given = [name for name in simulated if name in request.explicit]
    if given:
        option = f"--{given[0].replace('_', '-')}"
        raise InputError(f"--run uses this host's devices, and {option} concerns a simulation; leave one of them out")
    if len(request.policy or ()) > 1:
        raise InputError(f"--run follows one policy, not {len(request.policy or ())}; give one --policy")


def _options(request: ScheduleRequest, policy: str) -> ScheduleOptions:
    form = {
        "policy": policy, "allocation": request.allocation, "packing": request.packing, "backfill": request.backfill,
        "round_s": request.round_s, "start_s": request.start_s, "disk_bytes_per_s": request.disk,
    }  # fmt: skip
    return ScheduleOptions.from_json(json.dumps(form), source="the options of schedule")


def _read_cluster(request: ScheduleRequest) -> tuple[list[Server], Machine | None]:
    """Returns the servers, owned and rented, and the machine that they are; None if only a list of nodes is given."""
    if request.machine is None:
        raise InputError("schedule needs a cluster with --machine; or --run, to train the jobs on this host")
    prices = _read_prices(request.price)
    listed = read_servers(request.machine)
    if listed is not None:
        servers = [s._replace(price_per_hour=s.gpus * prices.get(s.kind, 0.0)) for s in listed]
        machine = None
    else:
        machine = read_machine(request.machine)
        servers = servers_of(machine, prices)
    for number, text in enumerate(request.rent or ()):
        hosts, _, price = text.rpartition("@")
        try:
            each = float(price)
        except ValueError:
            each = -1.0
        if not hosts or each < 0:
            raise InputError(
                f"--rent is HOSTS@PRICE with the price of an hour of each, such as '4xa100@20', not '{text}'"
            )
        spare = servers_of(read_machine(hosts), rent_price=each)
        servers += [server._replace(name=f"rent{number}/{server.name}") for server in spare]
    return servers, machine


def _read_prices(texts: Sequence[str] | None) -> dict[str, float]:
    prices = {}
    for text in texts or ():
        kind, _, number = text.partition("=")
        try:
            prices[kind] = float(number)
        except ValueError:
            raise InputError(f"--price is KIND=PRICE, such as a100=2.5, not '{text}'") from None
    return prices


def with_rates(
    jobs: Sequence[ClusterJob], request: ScheduleRequest, machine: Machine | None, progress: Progress
) -> tuple[ClusterJob, ...]:
    """Returns the jobs with their tables of throughput: their own, those of a file, or from plans, one per question."""
    known = read_rates(request.rates) if request.rates else None
    planned: dict[object, ClusterJob] = {}
    done = []
    for number, job in enumerate(jobs):
        if job.rates or job.duration_s is not None:
            done.append(job)
            continue
        if not job.model:
            raise InputError(f"job '{job.name}' has neither a model, nor rates, nor a duration_s; give one of them")
        if known is not None:
            if job.model not in known:
                raise InputError(f"{request.rates} has no model '{job.model}'{nearest(job.model, known)}")
            done.append(job.replace(rates=known[job.model]))
            continue
        if machine is None:
            raise InputError(
                f"job '{job.name}' needs a plan for model '{job.model}', and {request.machine} only lists servers; give"
                " --rates, or a machine with known devices"
            )
        question = (job.model, job.batch, job.gpus, job.most_gpus, job.kinds, job.prepare_s)
        if question not in planned:
            progress(number / len(jobs), f"planning {job.model}")
            planned[question] = _planned(job, machine, request.plan_budget)
        done.append(job.replace(rates=planned[question].rates))
    return tuple(done)


def _planned(job: ClusterJob, machine: Machine, budget_s: float) -> ClusterJob:
    def profile_of(part: Machine) -> Profile:
        return read_job_profile(job, part)

    rates = plan_rates(job, machine, profile_of, budget_s)
    if not rates:
        gpus = f"{job.gpus:g} GPUs" if job.gpus != 1 else "1 GPU"
        raise InputError(
            f"job '{job.name}': model '{job.model}' with a batch of {job.batch} fits on no server of the cluster with"
            f" {gpus}; ask for more GPUs or a smaller batch, or see 'pipedejavu plan' for what it lacks"
        )
    return job.replace(rates=rates)


def read_job_profile(job: ClusterJob, machine: Machine) -> Profile:
    """Returns the profile of a job's model on a part of the cluster."""
    if job.model.endswith((".json", *PUBLISHED)):
        return read_profile(job.model, [device.kind for device in machine.devices])
    if not job.model.startswith(("zoo:", "hf:")) and ".py:" not in job.model:
        return estimate_profile(job.model, machine)
    require_torch(*MEASURING)
    from pipedejavu.planner.profiling import estimate_model

    return estimate_model(read_model(job.model), min(job.batch, 8), machine, lambda _: None).profile


def _form(course: ClusterCourse) -> dict[str, object]:
    summary = json.loads(summarise(course).model_dump_json())
    return {**summary, "jobs": [json.loads(job.model_dump_json()) for job in outcomes(course)]}


def _print(summaries: Sequence[ScheduleSummary]) -> None:
    first = summaries[0]
    console = terminal(soft_wrap=True)
    console.print(
        f"{first.num_jobs:,} jobs on {first.num_servers:,} servers, {first.allocation}, packing {first.packing}\n"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    heads = ("mean", "median", "99 %", "makespan", "GPUs held", "fairness", "preempted", "late", "cost")
    table.add_column("policy")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for s in summaries:
        times = (s.mean_completion_s, s.median_completion_s, s.p99_completion_s, s.makespan_s)
        table.add_row(
            s.policy, *map(format_seconds, times), f"{s.gpu_utilisation:.1%}", f"{s.fairness:.3f}",
            f"{s.num_preemptions:,}", f"{s.num_missed_deadlines}", f"{s.cost:,.2f}" if s.cost else "–",
        )  # fmt: skip
    terminal(width=max(console.width, 110)).print(table)
