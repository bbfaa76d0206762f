"""The command line: arguments, printing and file paths; no logic of its own."""

import sys
from typing import Annotated, cast

import typer

from pipedejavu.analysis import verify as verify_program
from pipedejavu.cli import show
from pipedejavu.cli.input_files import Inputs, read_inputs
from pipedejavu.facts import InputError, keep_heap, write_file
from pipedejavu.facts.printable import tell
from pipedejavu.facts.version import VERSION
from pipedejavu.plan import preset, presets
from pipedejavu.program import compile  # noqa: A004
from pipedejavu.report import render_grid, render_html, render_trace
from pipedejavu.simulate import check_fit, unit_costs
from pipedejavu.simulate import simulate as simulate_program

app = typer.Typer(
    name="pipedejavu",
    help="Plan, preview and run the training of deep networks on mixed CPU and GPU hardware.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"pipedejavu {VERSION}")
        raise typer.Exit


@app.callback()
def begin(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plan, preview and run the training of deep networks on mixed CPU and GPU hardware."""


@app.command("presets")
def list_presets(
    name: Annotated[str | None, typer.Argument(help="A preset; without it, the table of all.")] = None,
    workers: Annotated[int | None, typer.Option(help="Workers to show it with.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Microbatches to show it with.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the presets, or show one: its axes, and its program as a grid."""
    if name is None:
        show.print_presets(presets(), as_json)
        return
    found = preset(name.removeprefix("preset:"))
    plan = found.at(workers=workers, microbatches=microbatches)
    program = compile(*unit_costs(plan, {}))
    prediction = simulate_program(program, verify_program(program))
    show.print_preset(found.title, plan, program, render_grid(prediction.timeline(), show.num_slices()), as_json)


@app.command()
def simulate(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan file, or preset:NAME.")],
    workers: Annotated[
        int | None, typer.Option(help="Workers of a pipeline, or replicas or shards without one.")
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(help="Microbatches of an update, or in all without a flush.")
    ] = None,
    replicas: Annotated[int | None, typer.Option(help="Data-parallel copies.")] = None,
    steps: Annotated[int | None, typer.Option(help="Updates to simulate.")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples in a microbatch.")] = None,
    recompute: Annotated[float | None, typer.Option(help="Share of each stage's units to recompute, 0 to 1.")] = None,
    unit_costs: Annotated[
        str | None, typer.Option(help="Costs of a worker's forward and backward of a microbatch, as F=1,B=2.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A model by its shape, such as gpt-small.")] = None,
    profile: Annotated[str | None, typer.Option(help="A profile instead of a model: JSON, graph.txt or CSV.")] = None,
    machine: Annotated[
        str | None, typer.Option(help="A machine file, or such as '4xa100 + epyc-7763'; by default this one's shape.")
    ] = None,
    trace: Annotated[str | None, typer.Option(help="Write a trace for Perfetto to this file.")] = None,
    html: Annotated[str | None, typer.Option(help="Write the report, one HTML page, to this file.")] = None,
    out: Annotated[str | None, typer.Option(help="Write the timeline as JSON to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict a plan's time, memory and timeline."""
    sizes = {"workers": workers, "microbatches": microbatches, "replicas": replicas, "steps": steps, "samples": samples}
    inputs = read_inputs(Inputs(plan, sizes, recompute, unit_costs, model, profile, machine))
    program = compile(inputs.plan, inputs.profile, inputs.machine)
    prediction = simulate_program(program, verify_program(program))
    check_fit(prediction)
    if trace or html or out:
        timeline = prediction.timeline()
        if trace:
            write_file(trace, render_trace(timeline))
        if out:
            write_file(out, timeline.to_json(indent=None))
        if html:
            decisions = [(d.axis, d.choice, d.reason) for d in program.plan.decisions]
            title = f"{program.plan.name} · {inputs.profile.name} on {inputs.machine.name}"
            write_file(html, render_html(timeline, title, program.plan.axes(), decisions, inputs.notes))
    show.print_prediction(prediction, inputs.notes, [f for f in (trace, html, out) if f], as_json)


@app.command()
def probe(
    out: Annotated[str, typer.Option(help="Write the machine to this file.")] = "machine.json",
    quick: Annotated[bool, typer.Option(help="Take a quarter of a minute; spreads are wider.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine: its devices, its links, its disk; in under a minute."""
    from pipedejavu.cli import probe_command

    probe_command.run(out, quick, as_json)


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="zoo:NAME, hf:CONFIG, FILE.py:FUNCTION, a profile file, or a shape such as gpt-small."
        ),
    ],
    machine: Annotated[
        str | None, typer.Option(help="A machine file, or such as '4xa100 + epyc-7763'; by default this one, measured.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Samples of an update.")] = 32,
    samples: Annotated[int | None, typer.Option(help="Samples of a microbatch; by default what is best.")] = None,
    search: Annotated[str, typer.Option(help="auto, exhaustive, dp, mcmc or gradient.")] = "auto",
    objective: Annotated[
        str, typer.Option(help="time or price of a sample; batch or blocks: the most that fit.")
    ] = "time",
    price: Annotated[list[str] | None, typer.Option(help="Of an hour on a kind of device, as a100=2.5.")] = None,
    staleness: Annotated[int, typer.Option(help="How many updates old weights may be; 0 is synchronous.")] = 0,
    costed: Annotated[
        bool, typer.Option(help="Also plans that the engine does not run yet: ZeRO, divided operators.")
    ] = False,
    time_budget: Annotated[float, typer.Option(help="Seconds for the search.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Of searchers that draw.")] = 0,
    candidates: Annotated[int, typer.Option(help="Plans to show at most.")] = 5,
    renew: Annotated[bool, typer.Option(help="Measure again what is kept from before.")] = False,
    out: Annotated[str | None, typer.Option(help="Write the best plan as JSON to this file, for 'train'.")] = None,
    html: Annotated[str | None, typer.Option(help="Write the report, one HTML page, to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Search for the best plan, and say why it is the best and what would be better."""
    from pipedejavu.cli import plan_command

    given: dict[str, object] = {
        "batch": batch,
        "samples": samples,
        "searcher": search,
        "objective": objective,
        "staleness": staleness,
    }
    given |= {"time_budget_s": time_budget, "seed": seed, "candidates": candidates, "is_runnable": not costed}
    options = plan_command.read_options(given, price or [])
    plan_command.run(plan_command.PlanRequest(model, machine, options, renew, out, html, as_json))


@app.command()
def profile(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="zoo:NAME, hf:CONFIG or FILE.py:FUNCTION.")],
    batch: Annotated[int, typer.Option(help="Samples in a batch.")] = 8,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of an hf: model's sequences; by default all it has, at most 128, estimated 4096."),
    ] = None,
    out: Annotated[str | None, typer.Option(help="Write the profile as JSON to this file.")] = None,
    estimate: Annotated[bool, typer.Option(help="Count instead of measuring; the model gets no memory.")] = False,
    machine: Annotated[
        str | None, typer.Option(help="A machine file to estimate for; by default this machine's shape.")
    ] = None,
    parts: Annotated[
        list[int] | None,
        typer.Option(help="Also measure a CPU divided between so many workers; may be given again."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure or estimate a model's units, and say what training it takes."""
    from pipedejavu.cli import profile_command  # needs torch

    profile_command.run(
        profile_command.ProfileRequest(model, batch, context, out, estimate, machine, tuple(parts or ()), as_json)
    )


@app.command()
def train(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="zoo:NAME, hf:CONFIG or FILE.py:FUNCTION.")],
    plan: Annotated[str, typer.Option(help="auto, a plan file, or preset:NAME.")] = "auto",
    workers: Annotated[int | None, typer.Option(help="Workers of a pipeline, or replicas without one.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Data-parallel copies of a pipeline.")] = None,
    microbatches: Annotated[
        int | None, typer.Option(help="Microbatches of an update, for each pipeline or replica.")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Samples in a microbatch.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples of an update of plan auto; 32 by default.")] = None,
    tries: Annotated[
        int, typer.Option("--try", help="Plans of auto that run some updates first; the fastest goes on.")
    ] = 1,
    cpu_share: Annotated[
        float | None, typer.Option(help="Part of a batch for CPU replicas, 0 to 1; by default what is fastest.")
    ] = None,
    trim: Annotated[int | None, typer.Option(help="Contributions that preset:zeno drops from each update.")] = None,
    byzantine: Annotated[
        str | None, typer.Option(help="Make replicas faulty: COUNT:KIND[:FACTOR], of sign-flip, scale or random.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Updates to make.")] = 100,
    init_candidates: Annotated[int, typer.Option(help="Initialisations that compete; the best goes on.")] = 1,
    init_steps: Annotated[int, typer.Option(help="Updates that each of them makes at most.")] = 50,
    data: Annotated[str | None, typer.Option(help="digits, mnist[:DIR], cifar10[:DIR], stdlib or random.")] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="Safetensors to begin with: a file, a folder, or for hf: a name on the hub."),
    ] = None,
    optimizer: Annotated[str, typer.Option(help="sgd or adamw.")] = "adamw",
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    clip_norm: Annotated[float | None, typer.Option(help="Clip gradients to this norm over all stages.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or float64, of weights and all that is computed.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of weights, data order and dropout.")] = 0,
    audit: Annotated[
        bool, typer.Option(help="Replay the run in float64; exits 1 if it differs by more than rounding.")
    ] = False,
    check_model: Annotated[
        bool, typer.Option(help="Compare the model with the units that it is cut into before the first update.")
    ] = True,
    on_nan: Annotated[str, typer.Option(help="stop or skip an update whose gradients are not finite.")] = "stop",
    max_consecutive_skips: Annotated[
        int, typer.Option(help="Updates in a row that --on-nan skip leaves out before the run stops.")
    ] = 10,
    machine: Annotated[str | None, typer.Option(help="A machine file; by default this machine's own devices.")] = None,
    devices: Annotated[str, typer.Option(help="auto (GPUs first, then the CPU), cpu or gpu.")] = "auto",
    run_dir: Annotated[str | None, typer.Option(help="Folder for what the run leaves.")] = None,
    log: Annotated[list[str] | None, typer.Option(help="tensorboard, wandb or mlflow; may be given again.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --run-dir, or begin it where there is none.")
    ] = False,
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="Resume though the model's source, the data or the run's files changed."),
    ] = False,
    allow_restart: Annotated[
        bool, typer.Option("--allow-restart", help="Resume at step 0 if all of the run's checkpoints are damaged.")
    ] = False,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints, 0 for none; by default by their cost.")
    ] = None,
    hang_after_s: Annotated[
        float | None,
        typer.Option("--hang-after", help="Seconds until a worker hangs, 0 for ever; by default by the forecast."),
    ] = None,
    check_replicas: Annotated[
        int, typer.Option(help="Updates between comparisons of replicas that must be equal, 0 for none.")
    ] = 50,
    replan: Annotated[
        bool | None,
        typer.Option(help="Ask the planner again where measured costs leave the forecast; by default with plan auto."),
    ] = None,
    on_oom: Annotated[
        str, typer.Option(help="stop where a device runs out of memory, or replan for what it has and go on.")
    ] = "stop",
    as_json: AsJson = False,
) -> None:
    """Train a model with a plan, a process for each worker; under torchrun its processes are the workers."""
    from pipedejavu.cli import plan_choice, train_command  # needs torch

    sizes = {"workers": workers, "replicas": replicas, "microbatches": microbatches, "samples": samples, "trim": trim}
    is_replanned = (plan == "auto" and not audit and checkpoint_every != 0) if replan is None else replan
    given = {**context.params, "keeps_log": audit, "log": log or [], "replan": is_replanned}
    options = train_command.read_options(model, given)
    names = frozenset(name for name in context.params if _is_given(context, name))
    request = plan_choice.TrainRequest(
        plan, sizes, batch, cpu_share, machine, cast(plan_choice.Devices, devices), run_dir, resume, names, as_json,
        tries,
        accept_changes, allow_restart,
    )  # fmt: skip
    try:
        train_command.run(options, request)
    finally:
        show.show_cursor()


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether an option was on the command line, rather than left to its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


@app.command()
def compare(
    run_dir: Annotated[
        str, typer.Argument(metavar="RUN_DIR", help="The folder of a finished run, or a recording of HybridAdamW.")
    ],
    as_json: AsJson = False,
) -> None:
    """Compare prediction and measurement of a run, kind of action by kind."""
    from pipedejavu.cli import compare_command  # needs torch

    compare_command.compare(run_dir, as_json)


@app.command()
def runs(
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FOLDER]...", help="A folder of runs to list, or run folders to set side by side."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder, or set some side by side."""
    from pipedejavu.cli import runs_command as verb

    verb.run(paths or ["runs"], as_json)


@app.command()
def export(
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR", help="The folder of a run that has checkpoints.")],
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A new folder to write to.")],
    to: Annotated[
        str, typer.Option(help="hugging: safetensors as transformers reads them; dcp: for torch's own.")
    ] = "hugging",
    config: Annotated[str | None, typer.Option(help="A config.json to put beside the weights.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write the newest checkpoint of a run to a folder that others read."""
    from pipedejavu.cli import export_command

    export_command.run(run_dir, folder, to, config, as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what is installed here, what is missing, and what to do; exits 1 where training is not possible."""
    from pipedejavu.cli import doctor_command as verb

    verb.run(VERSION, as_json)


def main() -> None:
    """Runs the command line; a fault of the user's exits 2 with one clear sentence."""
    keep_heap()  # what is measured here is measured as the workers run
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
        usage = getattr(error, "format_message", None)  # a fault of usage, found by the parser of arguments
        if usage is None:
            raise
        _fail(f"{usage().rstrip('.')}; try 'pipedejavu --help'")


def _fail(text: str) -> None:
    tell(text)
    sys.exit(2)
