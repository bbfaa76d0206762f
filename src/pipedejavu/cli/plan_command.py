"""The verb `plan`: reads or measures model and machine, searches, and prints the best plan and why it is the best."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import typer
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from pipedejavu.cli.drop_command import DropRequest, search_drop_table
from pipedejavu.cli.input_files import AsJson, PlannedModel, Speeds, read_amounts, read_model, read_speeds
from pipedejavu.cli.installed import require_torch
from pipedejavu.cli.plan_answer import PlanAnswer, describe_memory, explain
from pipedejavu.cli.plan_origin import with_origin
from pipedejavu.cli.terminal import print_json, styled, terminal
from pipedejavu.facts import (
    InputError,
    Machine,
    Profile,
    format_seconds,
    read_machine,
    read_profile,
    with_part_times,
    write_file,
)
from pipedejavu.facts.measurement import MEASURE_S
from pipedejavu.facts.printable import printable
from pipedejavu.facts.published import PUBLISHED
from pipedejavu.plan import Plan
from pipedejavu.program import compile as compile_plan
from pipedejavu.report import Choice, headlines, render_html, step_time
from pipedejavu.search import (
    Progress,
    RankedPlan,
    SearchOptions,
    SearchResult,
    advise,
    find_largest,
    leaner_plans,
    nothing_fits,
    search,
)
from pipedejavu.simulate import simulate
from pipedejavu.zoo import estimate_profile
from pipedejavu.zoo.gpt_shape import read_shape, shape_text, tokens_of

MEASURING = ("measuring", "pip install 'pipedejavu[train]', or give --machine and a profile")
"""What needs torch, and what to do without it."""


@dataclass(frozen=True)
class PlanRequest:
    """The arguments and options of `plan`."""

    model: PlannedModel
    machine: Annotated[
        str | None,
        typer.Option(help="A machine file, or a text such as '4xa100 + epyc-7763'; by default this machine, measured."),
    ] = None
    speed: Speeds = None
    batch: Annotated[int, typer.Option(help="Samples per update.")] = 32
    samples: Annotated[int | None, typer.Option(help="Samples per microbatch; by default the best.")] = None
    search: Annotated[
        str,
        typer.Option(
            help="auto, exhaustive, dp, mcmc or gradient; or genetic, for the filters that preset distreal drops."
        ),
    ] = "auto"
    objective: Annotated[
        str,
        typer.Option(
            help="Minimise time or price per sample, or find the largest batch, the most blocks or the longest context"
            " that fit: time, price, batch, blocks or context."
        ),
    ] = "time"
    price: Annotated[
        list[str] | None, typer.Option(help="Price per hour of a kind of device, such as a100=2.5; may be repeated.")
    ] = None
    staleness: Annotated[int, typer.Option(help="Most updates by which weights may be stale; 0 is synchronous.")] = 0
    costed: Annotated[bool, typer.Option(help="Include plans that are only costed, not run.")] = False
    data: Annotated[
        str | None, typer.Option(help="For --search genetic: the data that it trains on, as for 'train'.")
    ] = None
    measure_budget_s: Annotated[
        float, typer.Option("--measure-budget", help="Seconds for measuring the model; what is left out is estimated.")
    ] = MEASURE_S
    time_budget: Annotated[float, typer.Option(help="Seconds for the search.")] = 60.0
    precision: Annotated[
        str, typer.Option(help="For a model measured here: as for 'train', such as bf16 or 'bf16, int8 moments'.")
    ] = "auto"
    seed: Annotated[int, typer.Option(help="Seed of randomised searchers.")] = 0
    candidates: Annotated[int, typer.Option(help="Most plans to show.")] = 5
    renew: Annotated[bool, typer.Option(help="Measure again instead of using cached measurements.")] = False
    out: Annotated[str | None, typer.Option(help="Write the best plan as JSON to this file, for 'train'.")] = None
    html: Annotated[str | None, typer.Option(help="Write the report, one HTML page, to this file.")] = None
    as_json: AsJson = False

    def search_options(self) -> SearchOptions:
        """Returns the options of the search; raises InputError with all faults."""
        prices = read_amounts("price", self.price)
        names = ("batch", "samples", "objective", "staleness", "seed", "candidates")
        form: dict[str, object] = {name: getattr(self, name) for name in names}
        form |= {"searcher": self.search, "time_budget_s": self.time_budget, "is_runnable": not self.costed}
        return SearchOptions.from_json(json.dumps({**form, "prices": prices}), source="the options of plan").agreed()


class PlanInputs(NamedTuple):
    """The profile, machine and options of a search, and notes for the user on where they come from."""

    profile: Profile
    machine: Machine
    options: SearchOptions
    notes: tuple[str, ...]


def run(request: PlanRequest) -> None:
    """Searches, and prints or writes the result.

    The best plan takes one search. Advice takes one more per change that it considers (a larger batch, stale weights,
    faster links, more memory, one more GPU), since each has another machine or other options: about seven searches in
    all on a host with GPUs. `--html` adds up to six with less memory. Only the objectives batch, blocks and context
    repeat one: `find_largest` ends with a search for the largest question, without its alternatives.
    """
    if request.search == "genetic":
        asked = DropRequest(
            request.model, request.machine, request.data, request.samples or request.batch, request.seed,
            request.time_budget, request.out, request.as_json,
        )  # fmt: skip
        with show_progress() as progress:
            search_drop_table(asked, progress)
        return
    if request.data is not None:
        raise InputError("--data is for --search genetic, which trains; other searches only measure")
    options = request.search_options()
    with show_progress() as progress:
        problem = read_inputs(request, options, progress)
        with_context = _with_context(request.model, problem.machine)
        largest = find_largest(problem.profile, problem.machine, options, progress, with_context)
        if largest is not None:
            notes = (f"largest: {largest.text}", *problem.notes)
            problem = PlanInputs(largest.profile, problem.machine, largest.options, notes)
        result = search(problem.profile, problem.machine, problem.options, progress)
        if result.best is None:
            raise nothing_fits(problem.profile, problem.machine, problem.options, is_complete=result.is_complete)
        if _is_profile(request.model):
            _, sentences = with_part_times(problem.profile, result.best.machine)
            problem = problem._replace(notes=(*problem.notes, *(f"profile: {sentence}" for sentence in sentences)))
        question = (problem.profile, problem.machine, problem.options, result.best, progress)
        answer = PlanAnswer(result, leaner_plans(*question) if request.html else (), advise(*question))
    best = result.best
    if request.out:
        with_origin(best).save(request.out)
    if request.html:
        write_file(request.html, _page(best, answer, problem, by_price=problem.options.objective == "price"))
    if request.as_json:
        print_json(_form(best, answer, problem, request))
    else:
        _print(best, answer, problem, request)


@contextmanager
def show_progress() -> Iterator[Progress]:
    """Shows a progress bar on a terminal."""
    columns = (TextColumn("{task.description:<48.48}", markup=False), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=terminal(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        line = bar.add_task("starting", total=1.0)
        yield lambda share, text: bar.update(line, description=printable(text), completed=min(1.0, share))


def read_inputs(request: PlanRequest, options: SearchOptions, progress: Progress) -> PlanInputs:
    """Returns profile and machine: those that the request names, or this machine and the model measured on it."""
    is_model = request.model.startswith(("zoo:", "hf:")) or ".py:" in request.model
    if request.precision != "auto" and not is_model:
        raise InputError("--precision is for a model that is measured or estimated here; profiles have their own")
    if request.speed and not _is_profile(request.model):
        raise InputError("--speed is for profiles; a model's times are measured, or estimated from each device's rate")
    machine, notes = _read_machine(request, progress)
    if not is_model:
        if _is_profile(request.model):
            kinds = [device.kind for device in machine.devices]
            profile = read_profile(request.model, kinds, read_speeds(request.speed))
        else:
            profile = estimate_profile(request.model, machine)
            notes.append("times are estimated from the model's shape and each device's stated rate")
        return PlanInputs(profile, machine, options, tuple(notes))
    require_torch(*MEASURING)
    from pipedejavu.plan.precision_request import PrecisionRequest
    from pipedejavu.planner.precision_choice import estimated_precision, with_precision

    if request.machine is None:
        import torch

        dtype = torch.float64 if PrecisionRequest.read(request.precision).compute == "fp64" else torch.float32
        chosen = with_precision(Plan(), request.precision, machine.devices, dtype=dtype)
    else:
        chosen = estimated_precision(request.precision, machine)
    clip = options.clip if chosen.precision.compute != "fp16" else "global"
    options = options.replace(precision=chosen.precision, clip=clip)
    notes += [f"precision: {decision.choice} ({decision.reason})" for decision in chosen.decisions]
    profile, more = _profile_model(request, options, machine, progress)
    return PlanInputs(profile, machine, options, (*notes, *more))


def _read_machine(request: PlanRequest, progress: Progress) -> tuple[Machine, list[str]]:
    """Returns the machine that the request names, or this one, and what the user should know of it."""
    notes = []
    if request.machine is not None:
        machine = read_machine(request.machine)
    else:
        require_torch(*MEASURING)
        from pipedejavu.planner.planning import survey_machine

        machine = survey_machine(lambda text, share: progress(share, text), renews=request.renew)
        assert machine.survey is not None
        notes.append(f"machine: {machine.name}, measured {machine.survey.date} (--renew measures again)")
    if machine.survey is not None and machine.survey.disturbance:
        notes.append(f"machine: {machine.survey.disturbance}")
    return machine, notes


def _profile_model(
    request: PlanRequest, options: SearchOptions, machine: Machine, progress: Progress
) -> tuple[Profile, list[str]]:
    """Returns the profile of a model, measured here or estimated for another machine, and where its times are from."""
    from pipedejavu.data.data_choice import DataChoice
    from pipedejavu.planner.planning import profile_here
    from pipedejavu.planner.profiling import estimate_model
    from pipedejavu.profile import TimeBudget

    model, precision = read_model(request.model), options.precision
    if request.machine is not None:
        samples = options.samples or min(options.batch, 8)
        estimated = estimate_model(model, samples, machine, lambda text: progress(0.0, text), precision=precision)
        return estimated.profile, ["times are estimated from what the model computes and each device's stated rate"]
    budget = TimeBudget(request.measure_budget_s)
    profile = profile_here(
        model, DataChoice(), options.batch, machine, lambda text: progress(budget.spent_share, text),
        renews=request.renew, precision=precision, budget=budget,
    )  # fmt: skip
    ruled_out = [f"{kind}: {reason}" for kind, reason in profile.estimated.items()]
    return profile, ["times are measured on this machine", *ruled_out]


def _with_context(model: str, machine: Machine) -> Callable[[int], Profile] | None:
    """Returns what estimates a shape with another number of tokens per sample; None for other models."""
    if tokens_of(model) is None:
        return None
    shape = read_shape(model)
    return lambda tokens: estimate_profile(shape_text(shape._replace(context=tokens)), machine)


def _is_profile(model: str) -> bool:
    """Whether a text names a profile's file: the project's JSON, PipeDream's graph.txt or a CSV table."""
    return model.endswith((".json", *PUBLISHED))


def _print(best: RankedPlan, answer: PlanAnswer, problem: PlanInputs, request: PlanRequest) -> None:
    console = terminal(soft_wrap=True)
    console.print(
        styled(problem.profile.name, "bold"), f"on {problem.machine.name}, a batch of {problem.options.batch}\n"
    )
    table = _table(answer.result.candidates, has_price=bool(problem.options.prices))
    width = console.measure(table, options=console.options.update(width=500)).maximum
    terminal(width=max(width, console.width)).print(table)
    for text in explain(best, answer, by_price=problem.options.objective == "price"):
        console.print(f"\n{text}")
    console.print()
    for note in _notes(answer.result, problem):
        console.print(note, style="dim")
    for file in (request.out, request.html):
        if file:
            console.print(f"wrote {file}")


def _table(candidates: Sequence[RankedPlan], has_price: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("plan")
    for column in ("update", "samples/s", *(["price of an update"] * has_price), "bubble"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("memory of each device", no_wrap=True)
    table.add_column("bounded by", no_wrap=True)
    for index, ranked in enumerate(candidates):
        name = ranked.plan.name if ranked.is_runnable else f"{ranked.plan.name} (costed only)"
        rate = f"{ranked.samples / ranked.time_s:.4g}" if ranked.time_s else "–"
        price = [f"{ranked.price:.3g}"] * has_price
        cells = [format_seconds(ranked.time_s), rate, *price, f"{ranked.bubble_fraction:.1%}"]
        table.add_row(name, *cells, describe_memory(ranked.memory), ranked.bound, style="" if index else "bold")
    return table


def _notes(result: SearchResult, problem: PlanInputs) -> list[str]:
    looked = f"{result.num_estimated:,} estimated, {result.num_simulated} simulated, {format_seconds(result.time_s)}"
    whole = "" if result.is_complete else "; not all were looked at, so there may be better ones"
    notes = [*problem.notes, f"search: {result.searcher}, as {result.reason} ({looked}{whole})", *result.notes]
    if result.best is not None and result.best.chance.varies:
        low, high = map(format_seconds, result.best.chance[1:])
        notes.append(f"error: in nine of ten such forecasts the first plan's update takes {low} to {high}")
    return notes


def _page(best: RankedPlan, answer: PlanAnswer, problem: PlanInputs, *, by_price: bool) -> str:
    program = compile_plan(best.plan, best.profile, best.machine)
    decisions = [(d.axis, d.choice, d.reason) for d in program.plan.decisions]
    choices = [
        Choice(
            name=ranked.plan.name,
            time_s=ranked.time_per_sample_s,
            share=ranked.fullest_share,
            memory=describe_memory(ranked.memory),
            bound=ranked.bound,
            is_winner=ranked is best,
        )
        for ranked in _different((*answer.result.candidates, *answer.leaner))
    ]
    title = f"{best.plan.name} · {problem.profile.name} on {problem.machine.name}"
    notes = [*(text.strip() for text in explain(best, answer, by_price=by_price)), *_notes(answer.result, problem)]
    prediction = simulate(program)
    rate = sum(program.sizes) * program.plan.steps / prediction.makespan_s if prediction.makespan_s else 0.0
    time = step_time(program, prediction.makespan_s)
    leads = headlines(program, rate, time, tokens_per_sample=tokens_of(program.profile.name))
    return render_html(prediction.timeline(), title, program.plan.axes(), decisions, notes, choices, leads=leads)


def _different(candidates: Sequence[RankedPlan]) -> list[RankedPlan]:
    """Returns the candidates without repeated plans."""
    return [ranked for n, ranked in enumerate(candidates) if ranked.plan not in [c.plan for c in candidates[:n]]]


def _form(best: RankedPlan, answer: PlanAnswer, problem: PlanInputs, request: PlanRequest) -> dict[str, object]:
    """Returns the answer as one object for JSON."""

    def candidate(ranked: RankedPlan) -> dict[str, Any]:
        form: dict[str, Any] = json.loads(ranked.model_dump_json(exclude={"machine", "profile", "plan"}))
        shown = {"chance": ranked.chance._asdict(), "axes": ranked.plan.axes()}
        return form | {"plan": json.loads(ranked.plan.to_json())} | shown

    result = answer.result
    return {
        "profile": problem.profile.name,
        "machine": problem.machine.name,
        "batch": problem.options.batch,
        "candidates": [candidate(ranked) for ranked in result.candidates],
        "leaner": [candidate(ranked) for ranked in answer.leaner],
        "explain": explain(best, answer, by_price=problem.options.objective == "price"),
        "advice": [json.loads(advice.model_dump_json()) for advice in answer.advice.found],
        "advice_left": answer.advice.left,
        "searcher": result.searcher,
        "is_complete": result.is_complete,
        "num_estimated": result.num_estimated,
        "num_simulated": result.num_simulated,
        "search_s": result.time_s,
        "notes": _notes(result, problem),
        "files": [file for file in (request.out, request.html) if file],
    }
