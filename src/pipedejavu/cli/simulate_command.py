"""The verb `simulate`: reads a plan, a model and a machine, and prints or writes the prediction."""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import typer

from pipedejavu.analysis import verify
from pipedejavu.cli import show
from pipedejavu.cli.input_files import AsJson, Speeds, read_plan, read_speeds
from pipedejavu.facts import InputError, Machine, Profile, read_machine, read_profile, with_part_times, write_file
from pipedejavu.plan import Plan
from pipedejavu.probe import read_shape
from pipedejavu.program import compile as compile_plan
from pipedejavu.report import headlines, render_html, render_trace, step_time
from pipedejavu.simulate import check_fit, parse_unit_costs, simulate, unit_costs
from pipedejavu.zoo import estimate_profile
from pipedejavu.zoo.gpt_shape import tokens_of

DEFAULT_MODEL = "gpt-small"


@dataclass(frozen=True)
class SimulateRequest:
    """The arguments and options of `simulate`."""

    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan file, or preset:NAME.")]
    workers: Annotated[
        int | None, typer.Option(help="Workers per pipeline; without a pipeline, replicas or shards.")
    ] = None
    microbatches: Annotated[
        int | None, typer.Option(help="Microbatches per update; in total for plans that never flush.")
    ] = None
    replicas: Annotated[int | None, typer.Option(help="Data-parallel copies.")] = None
    steps: Annotated[int | None, typer.Option(help="Updates to simulate.")] = None
    samples: Annotated[int | None, typer.Option(help="Samples per microbatch.")] = None
    recompute: Annotated[float | None, typer.Option(help="Fraction of each stage's units to recompute, 0 to 1.")] = None
    unit_costs: Annotated[
        str | None, typer.Option(help="Time of a forward and a backward pass per microbatch, such as F=1,B=2.")
    ] = None
    model: Annotated[str | None, typer.Option(help="A model by its shape, such as gpt-small.")] = None
    profile: Annotated[str | None, typer.Option(help="A profile instead of a model: JSON, graph.txt or CSV.")] = None
    speed: Speeds = None
    machine: Annotated[
        str | None,
        typer.Option(help="A machine file, or a text such as '4xa100 + epyc-7763'; by default this machine's shape."),
    ] = None
    trace: Annotated[str | None, typer.Option(help="Write a trace for Perfetto to this file.")] = None
    html: Annotated[str | None, typer.Option(help="Write the report, one HTML page, to this file.")] = None
    out: Annotated[str | None, typer.Option(help="Write the timeline as JSON to this file.")] = None
    as_json: AsJson = False

    @property
    def sizes(self) -> dict[str, int | None]:
        """The sizes of the plan; None for those that stay as the plan has them."""
        names = ("workers", "microbatches", "replicas", "steps", "samples")
        return {name: getattr(self, name) for name in names}


class SimulateInputs(NamedTuple):
    """What `compile` needs, and notes for the user on where it comes from."""

    plan: Plan
    profile: Profile
    machine: Machine
    notes: tuple[str, ...]


def run(request: SimulateRequest) -> None:
    """Predicts a plan, and prints or writes the prediction."""
    inputs = read_inputs(request)
    program = compile_plan(inputs.plan, inputs.profile, inputs.machine)
    prediction = simulate(program, verify(program))
    check_fit(prediction)
    files = [file for file in (request.trace, request.html, request.out) if file]
    if files:
        timeline = prediction.timeline()
        if request.trace:
            write_file(request.trace, render_trace(timeline))
        if request.out:
            write_file(request.out, timeline.to_json(indent=None))
        if request.html:
            decisions = [(d.axis, d.choice, d.reason) for d in program.plan.decisions]
            title = f"{program.plan.name} · {inputs.profile.name} on {inputs.machine.name}"
            rate = sum(program.sizes) * program.plan.steps / prediction.makespan_s if prediction.makespan_s else 0.0
            time = step_time(program, prediction.makespan_s)
            leads = headlines(program, rate, time, tokens_per_sample=tokens_of(program.profile.name))
            page = render_html(timeline, title, program.plan.axes(), decisions, inputs.notes, leads=leads)
            write_file(request.html, page)
    show.print_prediction(prediction, inputs.notes, files, request.as_json)


def read_inputs(request: SimulateRequest) -> SimulateInputs:
    """Reads and checks all inputs."""
    plan = read_plan(request.plan, request.sizes)
    if request.recompute is not None:
        plan = plan.replace(order=plan.order.replace(recompute=request.recompute))
    if request.unit_costs is not None:
        return _with_unit_costs(plan, request.unit_costs, request)
    if request.model is not None and request.profile is not None:
        raise InputError("give --model or --profile, not both")
    if request.speed and request.profile is None:
        raise InputError("--speed is for --profile; a shape's times are estimated from each device's rate")
    notes = []
    if request.machine is not None:
        machine = read_machine(request.machine)
        if plan.place.devices is None:
            machine = machine.divided(plan.num_workers, by_kind=request.profile is not None)
        notes.extend(_origin(machine))
    else:
        machine = read_shape(plan.num_workers, by_kind=request.profile is not None)
        host = machine.hosts[0]
        notes.append(
            f"machine: the {host.cores} cores and the memory of this host, divided over {plan.num_workers} CPU workers;"
            " its rates are assumed, not measured"
        )
    if request.profile is not None:
        kinds = [device.kind for device in machine.devices]
        profile = read_profile(request.profile, kinds, read_speeds(request.speed))
        profile, sentences = with_part_times(profile, machine)
        return SimulateInputs(plan, profile, machine, (*notes, *(f"profile: {sentence}" for sentence in sentences)))
    profile = estimate_profile(request.model or DEFAULT_MODEL, machine)
    notes.append(f"model: {profile.name} from its shape; times are estimated from each device's stated rates")
    return SimulateInputs(plan, profile, machine, tuple(notes))


def _with_unit_costs(plan: Plan, costs: str, request: SimulateRequest) -> SimulateInputs:
    """Returns a plan with a model and a machine on which every action takes its unit cost."""
    for option in ("model", "profile", "machine"):
        if getattr(request, option) is not None:
            raise InputError(f"--unit-costs makes its own model and machine; leave out --{option}")
    note = "unit costs: time in units, no communication, every size one byte"
    return SimulateInputs(*unit_costs(plan, parse_unit_costs(costs)), (note,))


def _origin(machine: Machine) -> list[str]:
    """Returns a note on when a machine was measured, if it was."""
    if machine.survey is None:
        return []
    disturbed = [f"machine: {machine.survey.disturbance}"] if machine.survey.disturbance else []
    return [f"machine: {machine.name}, measured {machine.survey.date}", *disturbed]
