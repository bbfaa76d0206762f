"""`schedule --run`: runs a queue of jobs on this host's devices, and prints what became of each."""

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from pipedejavu.cli.installed import require_torch
from pipedejavu.cli.queue_forecast import QueueForecast
from pipedejavu.cli.run_file import read_run_file
from pipedejavu.cli.terminal import print_json, terminal
from pipedejavu.cli.train_command import read_options
from pipedejavu.cli.train_request import TrainRequest
from pipedejavu.cluster import ClusterJob, ScheduleOptions, Server, check_queue
from pipedejavu.facts import FaultsError, InputError, format_seconds, write_file
from pipedejavu.facts.printable import tell

if TYPE_CHECKING:
    from pipedejavu.job_queue import JobEntry, JobProcesses, QueueState

_NAME = re.compile(r"[\w-][\w.-]*")
_SET_BY_QUEUE = (
    "plan", "workers", "replicas", "samples", "batch", "steps", "epochs", "accumulate", "cpu_share", "machine",
    "devices", "tries", "audit", "replan", "log",
)  # fmt: skip
"""Options of `train` that follow from a job's other fields, or that a preempted run cannot have."""


def run_queue(
    jobs: Sequence[ClusterJob], options: ScheduleOptions, out: str, html: str | None, as_json: bool, ray: str | None
) -> None:
    """Runs a queue, or continues it; exits 1 if a job has failed, and with a signal's code if one stopped the queue.

    With the address of a Ray cluster it runs on that cluster's nodes.
    """
    require_torch("running jobs")
    from pipedejavu.job_queue import QueueRunner, QueueState, RayLostError, lock_queue, render_queue

    for job in jobs:
        check_job(job)
    forecast = QueueForecast()
    rated = forecast.with_rates(jobs)
    folder = Path(out)
    servers, make = _ray_nodes(ray) if ray is not None else _this_host()
    check_queue(rated, servers, options)
    with lock_queue(folder):
        processes = make(folder)
        state = QueueState.read(folder, jobs) or QueueState.of(rated, processes.now_at(), forecast.chances(jobs))
        state.write(folder)
        runner = QueueRunner(state, servers, options, processes, lambda changed: changed.write(folder), tell)
        with processes.obeying():
            try:
                runner.run()
            except RayLostError as error:
                tell(f"{error}; start it again and repeat the command with --out {folder}, which has the queue's state")
                raise SystemExit(1) from None
    if html:
        write_file(html, render_queue(runner.state, servers, options, folder))
    if as_json:
        forms = [_form(entry, runner.state.now_s, folder) for entry in runner.state.entries]
        print_json({"jobs": forms, "files": [html] if html else []})
    else:
        _print(runner.state)
    _end(runner.state, processes.stop_number, folder)


def _this_host() -> "tuple[list[Server], Callable[[Path], JobProcesses]]":
    from pipedejavu.job_queue import JobProcesses, as_server, local_devices

    devices = local_devices()
    return [as_server(devices)], lambda folder: JobProcesses(folder, devices)


def _ray_nodes(address: str) -> "tuple[list[Server], Callable[[Path], JobProcesses]]":
    from pipedejavu.job_queue import RayProcesses, connect

    nodes = connect(address)
    return [node.as_server() for node in nodes], lambda folder: RayProcesses(folder, nodes, tell)


def check_job(job: ClusterJob) -> None:
    """Raises InputError for a job that cannot be run, with what it lacks."""
    from pipedejavu.job_queue import config_of
    from pipedejavu.source.model_source import check_sources
    from pipedejavu.zoo import form_of

    if fault := _fault(job):
        raise InputError(f"job '{job.name}' {fault}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        write_file(path, config_of(job))
        try:
            options = read_options(read_run_file(TrainRequest(config=str(path))))
            check_sources(options)
            if job.model.startswith("zoo:"):
                form_of(options.model)
        except FaultsError as error:
            raise InputError(f"job '{job.name}': {'; '.join(error.faults)}") from None
        except InputError as error:
            raise InputError(f"job '{job.name}': {error}") from None


def _fault(job: ClusterJob) -> str:
    """Returns what is wrong with a job of a queue that is run; an empty text if nothing is."""
    if not _NAME.fullmatch(job.name):
        return "is not named as a folder can be; use letters, digits, '-', '_' and '.'"
    if not job.model:
        return "has no model to train; give one, such as zoo:mlp"
    if job.duration_s is not None:
        return "gives how long it takes, and a run needs its updates; give steps, or epochs with samples"
    if job.gpus < 1:
        return f"asks for {job.gpus:g} devices; a job that is run holds whole ones: GPUs, or on a host without, cores"
    if job.cores is not None:
        return "insists on cores; each device of a run brings its part of this host's cores, so leave them out"
    taken = [name for name in job.options if name in _SET_BY_QUEUE]
    if taken:
        return f"gives the option '{taken[0]}', which the queue sets from its steps, batch and devices; leave it out"
    split = job.options.get("microbatches", 1)
    if type(split) is not int or split < 1:
        return f"gives {split!r} microbatches; give a whole number from 1"
    for gpu_milli in job.counts():
        workers = gpu_milli // 1000
        if job.batch % (workers * split):
            return (
                f"has a batch of {job.batch}, which {workers} workers with {split} microbatches each cannot share"
                " evenly; give a multiple of their product, or other numbers of devices"
            )
    return ""


def _form(entry: "JobEntry", now_s: float, folder: Path) -> dict[str, object]:
    return {
        "name": entry.job.name,
        "state": entry.state,
        "steps": entry.steps,
        "waited_s": round(entry.waited_s(now_s), 3),
        "ran_s": round(entry.ran_s(now_s), 3),
        "num_preemptions": entry.num_preemptions,
        "num_retries": entry.num_retries,
        "forecast": entry.forecast and entry.forecast.model_dump(),
        "reason": entry.reason,
        "run_dir": str(folder / entry.job.name),
        "spans": [[span.start_s, span.end_s, list(span.devices)] for span in entry.spans],
    }


def _print(state: "QueueState") -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("job")
    table.add_column("state")
    for head in ("waited", "ran", "forecast", "preemptions"):
        table.add_column(head, justify="right", no_wrap=True)
    for entry in state.entries:
        waited, ran = entry.waited_s(state.now_s), entry.ran_s(state.now_s)
        table.add_row(
            entry.job.name, entry.state, format_seconds(waited), format_seconds(ran),
            entry.forecast.interval if entry.forecast else "–", f"{entry.num_preemptions}",
        )  # fmt: skip
    terminal().print(table)


def _end(state: "QueueState", stop_number: int, folder: Path) -> None:
    """Exits with the code of a stop or a failure."""
    left = sum(not entry.is_over for entry in state.entries)
    if stop_number and left:
        tell(f"stopped with {left} jobs to go on, from their checkpoints; repeat the command with --out {folder}")
        raise SystemExit(128 + stop_number)
    if any(entry.state != "ended" for entry in state.entries):
        raise SystemExit(1)
