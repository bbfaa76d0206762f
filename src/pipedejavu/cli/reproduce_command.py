"""The verb `reproduce`: lists experiments, runs them, writes a page and prints figures beside published ones."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from pipedejavu.cli.input_files import AsJson
from pipedejavu.cli.terminal import print_json, styled, terminal
from pipedejavu.facts import InputError, format_seconds, write_file
from pipedejavu.facts.printable import print_error
from pipedejavu.report import ExperimentFindings, render_findings
from pipedejavu.reproduce import EXPERIMENTS, Scale, Setting, experiment, run_experiment
from pipedejavu.reproduce.experiment import check_packages


@dataclass(frozen=True)
class ReproduceRequest:
    """The arguments and options of `reproduce`."""

    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Experiments; by default they are listed.")
    ] = None
    all: Annotated[bool, typer.Option("--all", help="Run every experiment.")] = False
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, in seconds: does it run?")] = False
    full: Annotated[bool, typer.Option("--full", help="The published size.")] = False
    seed: Annotated[int, typer.Option(help="Seed of weights and samples.")] = 0
    data: Annotated[str, typer.Option(help="Folder with data sets, such as data/mnist.")] = "data"
    out: Annotated[str, typer.Option(help="Folder for the pages.")] = "reproduced"
    as_json: AsJson = False


def run(request: ReproduceRequest) -> None:
    """Lists experiments, or runs some and writes a page about each, and one about all of them."""
    if request.quick and request.full:
        raise InputError("--quick and --full ask for two sizes; give one of them")
    if request.all and request.names:
        raise InputError(f"--all runs every experiment, and '{request.names[0]}' is named too; give one of them")
    chosen = list(EXPERIMENTS) if request.all else [experiment(name) for name in dict.fromkeys(request.names or ())]
    if not chosen:
        _print_list(request.as_json)
        return
    for each in chosen:
        check_packages(each)
    folder = _writable(Path(request.out))
    scale: Scale = "quick" if request.quick else "full" if request.full else "laptop"
    setting = Setting(scale, request.seed, Path(request.data), lambda text: print_error(f"  {text}"))
    findings, pages = [], []
    for each in chosen:
        print_error(f"{each.name}: {each.title}")
        findings.append(run_experiment(each, setting))
        pages.append(_write(folder / f"{each.name}.html", each.title, findings[-1:], scale))
        if not request.as_json:
            _print(findings[-1], pages[-1])
    if len(findings) > 1:
        pages.append(_write(folder / "index.html", "Experiments", findings, scale))
    if request.as_json:
        print_json({"scale": scale, "findings": [each.to_form() for each in findings], "pages": pages})
    elif len(findings) > 1:
        terminal(soft_wrap=True).print(f"\n{len(findings)} experiments in {pages[-1]}")


def _writable(folder: Path) -> Path:
    """Makes the folder for pages before anything runs; raises InputError if it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder} for pages: {error.strerror}; give another --out") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"the folder {folder} cannot be written to: permission denied; give another --out")
    return folder


def _write(path: Path, title: str, findings: Sequence[ExperimentFindings], scale: Scale) -> str:
    notes = {"quick": ["A quick run: sizes are so small that figures say only that the experiment runs."]}
    write_file(str(path), render_findings(title, findings, notes.get(scale, [])))
    return str(path)


def _print_list(as_json: bool) -> None:
    if as_json:
        rows = [{"name": each.name, "title": each.title, "needs": [*each.needs]} for each in EXPERIMENTS]
        print_json({"experiments": rows})
        return
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("experiment", "what it asks"):
        shown.add_column(column)
    for each in EXPERIMENTS:
        shown.add_row(styled(each.name, "cyan"), each.title)
    terminal().print(shown)
    terminal(soft_wrap=True).print("\n'pipedejavu reproduce NAME' runs one; --quick in seconds, --full as published.")


def _print(found: ExperimentFindings, page: str) -> None:
    console = terminal(soft_wrap=True)
    console.print(styled(found.title, "bold"), f" ({format_seconds(found.time_s)})")
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("figure", "today", "published"):
        shown.add_column(column, overflow="fold")
    for row in found.compared:
        shown.add_row(row.name, row.today, row.published)
    if found.compared:
        terminal().print(shown)
    for text in (*found.answers, *found.notes):
        console.print(text, markup=False)
    console.print(f"page: {page}\n")
