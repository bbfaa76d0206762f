"""Reads queues of jobs and lists of servers: JSON, CSV with the fields as columns, and two published traces.

- Alibaba's cluster-trace-gpu-v2023 ('openb'): tasks with CPU, memory and parts of GPUs, and its list of nodes.
- Synergy's 100 jobs: number, model, arrival, iterations and GPUs, without a header.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable
from typing import Any, get_args

from pydantic import Field

from pipedejavu.cluster.cluster_job import MILLI, ClusterJob, RateRow, check_jobs
from pipedejavu.cluster.server import Server
from pipedejavu.facts import FaultsError, InputError, Record, nearest, read_file

_OPENB = {"name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "gpu_spec", "creation_time", "deletion_time"}
_NODES = {"sn", "cpu_milli", "memory_mib", "gpu", "model"}
_TABLE = ("model", "kind", "gpus", "cores", "memory_bytes", "steps_per_s")
_NUM_SYNERGY = 5
MIB = 1 << 20


class JobQueue(Record):
    """A file of jobs."""

    jobs: tuple[ClusterJob, ...] = Field(min_length=1)


def read_jobs(path: str) -> tuple[ClusterJob, ...]:
    """Reads a queue; raises InputError with the line or the field that is wrong."""
    jobs = JobQueue.load(path).jobs if path.endswith(".json") else _read_csv(path)
    if not jobs:
        raise InputError(f"{path} holds no jobs; give at least one")
    check_jobs(jobs)
    return jobs


def read_servers(path: str) -> list[Server] | None:
    """Reads a list of nodes in the form of the 'openb' trace; None if the file is not one."""
    if not path.endswith(".csv"):
        return None
    rows = _rows(path)
    if not rows or not set(rows[0]) >= _NODES:
        raise InputError(f"{path} is not a list of servers; its columns are {', '.join(sorted(_NODES))}")
    header = rows[0]

    def server(row: dict[str, str]) -> Server:
        gpus = int(row["gpu"])
        return Server(row["sn"], row["model"] or "cpu", gpus, int(row["cpu_milli"]), int(row["memory_mib"]) * MIB)

    return _each(path, header, rows[1:], server)


def read_rates(path: str) -> dict[str, tuple[RateRow, ...]]:
    """Reads a table of throughput by model: CSV with model, kind, gpus, cores, memory_bytes and steps_per_s."""
    rows = _rows(path)
    if not rows or tuple(rows[0]) != _TABLE:
        raise InputError(f"{path} is not a table of throughput; its columns are {', '.join(_TABLE)}")
    rates: dict[str, tuple[RateRow, ...]] = {}

    def rate(row: dict[str, str]) -> tuple[str, RateRow]:
        form: dict[str, object] = {name: float(row[name]) for name in ("gpus", "cores", "steps_per_s")}
        form |= {"kind": row["kind"], "memory_bytes": int(row["memory_bytes"])}
        return row["model"], RateRow.from_json(json.dumps(form), source="the row")

    for model, entry in _each(path, rows[0], rows[1:], rate):
        rates[model] = (*rates.get(model, ()), entry)
    return rates


def _rows(path: str) -> list[list[str]]:
    text = read_file(path).decode("utf-8", "replace")
    return [row for row in csv.reader(io.StringIO(text)) if row]


def _each(
    path: str, header: list[str], rows: Iterable[list[str]], read: Callable[[dict[str, str]], Any], first: int = 2
) -> list[Any]:
    """Reads each row; raises InputError with the first line that is broken."""
    done = []
    for number, row in enumerate(rows, start=first):
        try:
            if len(row) != len(header):
                raise ValueError(f"it has {len(row)} fields, and the header has {len(header)}")
            done.append(read(dict(zip(header, row, strict=True))))
        except FaultsError as error:
            raise InputError(f"{path}, line {number}: {'; '.join(error.faults)}") from None
        except ValueError as error:
            raise InputError(f"{path}, line {number}: {error}") from None
    return done


def _read_csv(path: str) -> tuple[ClusterJob, ...]:
    rows = _rows(path)
    header = rows[0] if rows else []
    if set(header) >= _OPENB:
        return tuple(_each(path, header, rows[1:], _openb_job))
    if len(header) == _NUM_SYNERGY and header[0].isdecimal():
        names = ["number", "model", "arrival", "iterations", "gpus"]
        return tuple(_each(path, names, rows, _synergy_job, first=1))
    unknown = [name for name in header if name not in ClusterJob.model_fields]
    if unknown or "name" not in header:
        fault = (
            f"column '{unknown[0]}' is not known{nearest(unknown[0], ClusterJob.model_fields)}"
            if unknown
            else ("column 'name' is missing")
        )
        raise InputError(f"{path}: {fault}")
    return tuple(_each(path, header, rows[1:], _csv_job))


def _csv_job(row: dict[str, str]) -> ClusterJob:
    """Returns the job of a row whose columns are fields; lists are separated by spaces."""
    form = {name: _csv_value(name, text.strip()) for name, text in row.items() if text.strip()}
    return ClusterJob.from_json(json.dumps(form), source="the row")


def _csv_value(name: str, text: str) -> object:
    annotation = ClusterJob.model_fields[name].annotation
    if name in ("after", "kinds"):
        return text.split()
    if name == "options":
        return dict(_option(pair) for pair in text.split())
    if annotation is str:
        return text
    try:
        number = float(text)
    except ValueError:
        return text  # a quantity such as '2 GiB', or a fault that the record names
    return int(number) if number.is_integer() and int in (annotation, *get_args(annotation)) else number


def _option(pair: str) -> tuple[str, object]:
    """Returns the name and the value of 'NAME=VALUE'."""
    name, sign, text = pair.partition("=")
    if not (name and sign):
        raise ValueError(f"options are NAME=VALUE, separated by spaces, not '{pair}'")
    try:
        value = json.loads(text)
    except ValueError:
        return name, text
    return name, value if isinstance(value, bool | int | float) else text


def _openb_job(row: dict[str, str]) -> ClusterJob:
    """Returns a task; one that was never scheduled runs as long as it existed."""
    created, deleted = float(row["creation_time"]), float(row["deletion_time"])
    began = float(row["scheduled_time"]) if row.get("scheduled_time") else created
    if deleted < began:
        raise ValueError(f"the task is deleted at {deleted:g} s, before it begins at {began:g} s")
    gpus = int(row["num_gpu"]) * int(row["gpu_milli"]) / MILLI
    form = {"name": row["name"], "arrival_s": created, "duration_s": deleted - began, "gpus": gpus}
    form |= {"cores": int(row["cpu_milli"]) / MILLI, "memory_bytes": int(row["memory_mib"]) * MIB}
    form |= {"kinds": row["gpu_spec"].split("|") if row["gpu_spec"] else []}
    return ClusterJob.from_json(json.dumps(form), source="the row")


def _synergy_job(row: dict[str, str]) -> ClusterJob:
    form = {"name": f"{row['number']}-{row['model']}", "model": row["model"], "arrival_s": float(row["arrival"])}
    form |= {"steps": float(row["iterations"]), "gpus": int(row["gpus"])}
    return ClusterJob.from_json(json.dumps(form), source="the row")
