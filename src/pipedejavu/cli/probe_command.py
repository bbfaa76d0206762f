"""The verb `probe`: measures this machine with a progress bar, and prints the survey."""

import sys
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pipedejavu.cli.installed import require_torch
from pipedejavu.cli.terminal import styled, terminal
from pipedejavu.facts import InputError, Machine, Measurement, format_bytes, format_seconds
from pipedejavu.facts.printable import json_safe, printable

GROUPS = {
    "devices": ("matrix", "block", "efficiency", "memory", "update"),
    "links": ("copy", "peer copy", "duplex", "gloo", "shared memory", "nccl", "latency", "bandwidth"),
    "compute and transfers together": ("compute", "overlap"),
    "disk": ("write", "read"),
}
"""Titles of tables, and the measurements in each."""


def run(out: str, quick: bool, as_json: bool) -> None:
    """Measures this machine, writes it to a file and prints it."""
    if not Path(out).absolute().parent.is_dir():
        raise InputError(f"cannot write {out}: its folder does not exist")
    require_torch("measuring")
    from pipedejavu.planner.planning import keep_survey

    machine = _measure(Path(out).absolute().parent, quick)
    machine.save(out)
    keep_survey(machine)
    if as_json:
        print(json_safe(machine.to_json(indent=None)))
        return
    print_machine(machine)
    terminal(soft_wrap=True).print(f"wrote {out}; 'pipedejavu simulate PLAN --machine {out}' uses it")


def _measure(folder: Path, quick: bool) -> Machine:
    from pipedejavu.probe.survey import measure_machine

    columns = (TextColumn("{task.description:<48.48}", markup=False), BarColumn(), TimeElapsedColumn())
    console = terminal(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        line = bar.add_task("starting", total=1.0)

        def report(what: str, share: float) -> None:
            bar.update(line, description=printable(what), completed=min(1.0, share))

        machine: Machine = measure_machine(folder, quick=quick, report=report)
    return machine


def print_machine(machine: Machine) -> None:
    """Prints a measured machine: its host, every measurement with its spread, and what is unknown."""
    console = terminal(soft_wrap=True)
    host, survey = machine.hosts[0], machine.survey
    assert survey is not None
    sockets = "unknown sockets" if host.sockets is None else f"{host.sockets} sockets"
    nodes = "unknown NUMA nodes" if host.numa_nodes is None else f"{host.numa_nodes} NUMA nodes"
    console.print(
        styled(machine.name, "bold"), f" {host.processor or 'unknown processor'}, {host.cores} cores, ", end=""
    )
    console.print(f"{sockets}, {nodes}; {' '.join(host.instruction_sets) or 'unknown instruction sets'}")
    for title, kinds in GROUPS.items():
        rows = [row for row in survey.measurements if row.what in kinds]
        if not rows:
            continue
        shown = Table(box=None, pad_edge=False, header_style="bold", title=f"\n{title}", title_justify="left")
        for column in ("of", "what", "how", "value", "spread"):
            shown.add_column(column, justify="right" if column in ("value", "spread") else "left", no_wrap=True)
        for row in rows:
            spread = f"± {row.spread / row.value:.0%}" if row.spread and row.value else ""
            shown.add_row(row.subject, row.what, row.setting, format_value(row), spread)
        terminal(width=max(100, console.width)).print(shown)
    if survey.disturbance:
        console.print(f"disturbed: {survey.disturbance}")
    for line in survey.unknown:
        console.print(f"unknown: {line}")
    rounds = max((row.rounds for row in survey.measurements), default=0)
    versions = ", ".join(f"{name} {version}" for name, version in survey.versions.items())
    console.print(f"\n{rounds} rounds in {format_seconds(survey.time_s)}, {survey.date}; {versions}")


def format_value(row: Measurement) -> str:
    """Formats a measured value with its unit."""
    if row.unit == "B":
        return format_bytes(row.value)
    if row.unit == "s":
        return format_seconds(row.value)
    if row.unit == "×":
        return f"{row.value:.3g}"
    unit = "/s" if row.unit == "1/s" else row.unit
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if row.value >= scale:
            return f"{row.value / scale:.3g} {prefix}{unit}"
    return f"{row.value:.3g} {unit}"
