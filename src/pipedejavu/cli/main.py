"""The command line: the table of verbs. Verbs with many options take a typed request, beside their code."""

import sys
from typing import Annotated

import typer

from pipedejavu.analysis import verify
from pipedejavu.cli import (
    compare_command,
    doctor_command,
    export_command,
    plan_command,
    probe_command,
    profile_command,
    rent_command,
    reproduce_command,
    runs_command,
    schedule_command,
    show,
    simulate_command,
    train_command,
)
from pipedejavu.cli.input_files import AsJson
from pipedejavu.cli.option_range import check_ranges
from pipedejavu.cli.train_request import TrainRequest
from pipedejavu.cli.verb import add_verb
from pipedejavu.facts import InputError, keep_heap
from pipedejavu.facts.printable import tell
from pipedejavu.facts.version import VERSION
from pipedejavu.plan import preset, presets
from pipedejavu.program import compile  # noqa: A004
from pipedejavu.report import render_grid
from pipedejavu.simulate import simulate, unit_costs

app = typer.Typer(
    name="pipedejavu",
    help="Plan, preview and run the training of deep networks on mixed CPU and GPU hardware.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"pipedejavu {VERSION}")
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plan, preview and run the training of deep networks on mixed CPU and GPU hardware."""


@app.command("presets")
def list_presets(
    name: Annotated[str | None, typer.Argument(help="A preset; by default the table of all presets.")] = None,
    workers: Annotated[int | None, typer.Option(help="Workers to show it with.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Microbatches to show it with.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the presets, or show one: its axes, and its program as a grid."""
    check_ranges({"workers": workers, "microbatches": microbatches})
    if name is None:
        show.print_presets(presets(), as_json)
        return
    chosen = preset(name.removeprefix("preset:"))
    plan = chosen.at(workers=workers, microbatches=microbatches)
    program = compile(*unit_costs(plan, {}))
    prediction = simulate(program, verify(program))
    show.print_preset(chosen.title, plan, program, render_grid(prediction.timeline(), show.num_slices()), as_json)


add_verb(
    app, "simulate", simulate_command.SimulateRequest, simulate_command.run,
    "Predict a plan's time, memory and timeline.",
)  # fmt: skip


@app.command()
def probe(
    out: Annotated[str, typer.Option(help="Write the machine to this file.")] = "machine.json",
    quick: Annotated[bool, typer.Option(help="Take a quarter of a minute; spreads are wider.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine: its devices, its links, its disk; in under a minute."""
    probe_command.run(out, quick, as_json)


add_verb(
    app, "plan", plan_command.PlanRequest, plan_command.run,
    "Search for the best plan, and say why it is the best and what would be better.",
)  # fmt: skip
add_verb(
    app, "rent", rent_command.RentRequest, rent_command.run,
    "Compare machines that you could rent: the time and the cost of a whole training on each.",
)  # fmt: skip
add_verb(
    app, "profile", profile_command.ProfileRequest, profile_command.run,
    "Measure or estimate a model's units, and say what training it takes.",
)  # fmt: skip
add_verb(
    app, "train", TrainRequest, train_command.run,
    "Train a model with a plan, a process for each worker; under torchrun its processes are the workers.",
)  # fmt: skip


add_verb(
    app, "schedule", schedule_command.ScheduleRequest, schedule_command.run,
    "Schedule several jobs on one cluster: plan each, simulate policies, and compare them.",
)  # fmt: skip


@app.command()
def compare(
    run_dir: Annotated[
        str, typer.Argument(metavar="RUN_DIR", help="The folder of a finished run, or a recording of HybridAdamW.")
    ],
    as_json: AsJson = False,
) -> None:
    """Compare prediction and measurement of a run, per kind of action."""
    compare_command.compare(run_dir, as_json)


@app.command()
def runs(
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FOLDER]...", help="A folder of runs to list, or run folders to show side by side."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder, or show some side by side."""
    runs_command.run(paths or ["runs"], as_json)


@app.command()
def export(
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR", help="The folder of a run that has checkpoints.")],
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A new folder to write to.")],
    to: Annotated[
        str, typer.Option(help="hugging: safetensors that transformers reads; dcp: a checkpoint of torch.distributed.")
    ] = "hugging",
    config: Annotated[str | None, typer.Option(help="A config.json to put beside the weights.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write the newest checkpoint of a run in a format that other tools read."""
    export_command.run(run_dir, folder, to, config, as_json)


add_verb(
    app, "reproduce", reproduce_command.ReproduceRequest, reproduce_command.run,
    "Run the experiments behind this project, and set today's figures beside published ones.",
)  # fmt: skip


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """List what is installed, what is missing, and how to get it; exits 1 if training is not possible."""
    doctor_command.run(VERSION, as_json)


def main() -> None:
    """Runs the command line; an error of the user exits 2 with one sentence."""
    keep_heap()  # so that measurements in this process match those in workers
    try:
        app(standalone_mode=False)
    except InputError as error:
        _fail(str(error))
    except typer.Exit as leave:
        sys.exit(leave.exit_code)
    except typer.Abort:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:
        usage = getattr(error, "format_message", None)  # a usage error that the argument parser found
        if usage is None:
            raise
        _fail(f"{usage().rstrip('.')}; try 'pipedejavu --help'")


def _fail(text: str) -> None:
    tell(text)
    sys.exit(2)
