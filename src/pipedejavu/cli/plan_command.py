"""The verb `plan`: measures or reads what is needed, searches with a progress bar, and says which plan wins and why."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from pipedejavu.cli.input_files import read_model
from pipedejavu.cli.installed import require_torch
from pipedejavu.cli.terminal import print_json, styled, terminal
from pipedejavu.facts import (
    InputError,
    Machine,
    Profile,
    format_bytes,
    format_seconds,
    read_machine,
    with_part_times,
    write_file,
)
from pipedejavu.facts.printable import printable
from pipedejavu.program import compile as compile_plan
from pipedejavu.report import Choice, render_html
from pipedejavu.search import (
    Advised,
    MemoryNeed,
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
from pipedejavu.search.ranking import NEAR
from pipedejavu.simulate import simulate
from pipedejavu.zoo import estimate_profile

MEASURING = ("measuring", "pip install 'pipedejavu[train]', or give --machine and a profile")
"""What needs torch here, and what to do without it."""


@dataclass(frozen=True)
class PlanRequest:
    """What the user asked for."""

    model: str
    machine: str | None
    options: SearchOptions
    renews: bool
    out: str | None
    html: str | None
    as_json: bool


class PlanInputs(NamedTuple):
    """What there is to plan for, and where it comes from."""

    profile: Profile
    machine: Machine
    notes: tuple[str, ...]


class PlanAnswer(NamedTuple):
    """What was found."""

    result: SearchResult
    leaner: tuple[RankedPlan, ...]
    advice: Advised


def read_options(given: Mapping[str, object], prices: Sequence[str]) -> SearchOptions:
    """Returns the question to the planner; raises InputError with every fault."""
    by_kind = {}
    for text in prices:
        kind, _, number = text.partition("=")
        try:
            by_kind[kind] = float(number)
        except ValueError:
            raise InputError(f"--price is KIND=PRICE, such as a100=2.5, not '{text}'") from None
    return SearchOptions.from_json(json.dumps({**given, "prices": by_kind}), source="the options of plan").agreed()


def run(request: PlanRequest) -> None:
    """Searches, and prints or writes what was found."""
    with show_progress() as progress:
        problem = _set(request, progress)
        largest = find_largest(problem.profile, problem.machine, request.options, progress)
        if largest is not None:
            request = replace(request, options=largest.options)
            problem = PlanInputs(largest.profile, problem.machine, (f"largest: {largest.text}", *problem.notes))
        result = search(problem.profile, problem.machine, request.options, progress)
        if result.best is None:
            raise nothing_fits(problem.profile, problem.machine, request.options, is_complete=result.is_complete)
        if request.model.endswith(".json"):
            _, sentences = with_part_times(problem.profile, result.best.machine)
            problem = problem._replace(notes=(*problem.notes, *(f"profile: {sentence}" for sentence in sentences)))
        question = (problem.profile, problem.machine, request.options, result.best, progress)
        answer = PlanAnswer(result, leaner_plans(*question) if request.html else (), advise(*question))
    best = result.best
    if request.out:
        best.plan.save(request.out)
    if request.html:
        write_file(request.html, _page(best, answer, problem, by_price=request.options.objective == "price"))
    if request.as_json:
        print_json(_form(best, answer, problem, request))
    else:
        _print(best, answer, problem, request)


@contextmanager
def show_progress() -> Iterator[Progress]:
    """Shows on a terminal how far a search is, and what goes on."""
    columns = (TextColumn("{task.description:<48.48}", markup=False), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=terminal(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        line = bar.add_task("starting", total=1.0)
        yield lambda share, text: bar.update(line, description=printable(text), completed=min(1.0, share))


def _set(request: PlanRequest, progress: Progress) -> PlanInputs:
    """Returns the profile and the machine: those that were named, or what is here, measured."""
    is_model = request.model.startswith(("zoo:", "hf:")) or ".py:" in request.model
    notes = []
    if request.machine is not None:
        machine = read_machine(request.machine)
    else:
        require_torch(*MEASURING)
        from pipedejavu.planner.planning import survey_machine

        machine = survey_machine(lambda text, share: progress(share, text), renews=request.renews)
        assert machine.survey is not None
        notes.append(f"machine: {machine.name}, measured {machine.survey.date} (--renew measures again)")
    if not is_model:
        if request.model.endswith(".json"):
            profile = Profile.load(request.model)
        else:
            profile = estimate_profile(request.model, machine)
            notes.append("times are estimated from the model's shape and each device's stated rate")
    elif request.machine is None:
        require_torch(*MEASURING)
        from pipedejavu.planner.planning import profile_here

        profile = profile_here(
            read_model(request.model),
            None,
            request.options.batch,
            machine,
            lambda text: progress(0.0, text),
            renews=request.renews,
        )
        notes.append("times are measured on this machine")
    else:
        require_torch(*MEASURING)
        from pipedejavu.planner.profiling import estimate_model

        samples = request.options.samples or min(request.options.batch, 8)
        profiled = estimate_model(read_model(request.model), samples, machine, lambda text: progress(0.0, text))
        profile = profiled.profile
        notes.append("times are estimated from what the model computes and each device's stated rate")
    return PlanInputs(profile, machine, tuple(notes))


def _print(best: RankedPlan, answer: PlanAnswer, problem: PlanInputs, request: PlanRequest) -> None:
    console = terminal(soft_wrap=True)
    console.print(
        styled(problem.profile.name, "bold"), f"on {problem.machine.name}, a batch of {request.options.batch}\n"
    )
    table = _table(answer.result.candidates, has_price=bool(request.options.prices))
    width = console.measure(table, options=console.options.update(width=500)).maximum
    terminal(width=max(width, console.width)).print(table)
    for text in explain(best, answer, by_price=request.options.objective == "price"):
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
    for index, found in enumerate(candidates):
        name = found.plan.name if found.is_runnable else f"{found.plan.name} (costed only)"
        rate = f"{found.samples / found.time_s:.4g}" if found.time_s else "–"
        price = [f"{found.price:.3g}"] * has_price
        cells = [format_seconds(found.time_s), rate, *price, f"{found.bubble_fraction:.1%}"]
        table.add_row(name, *cells, describe_memory(found.memory), found.bound, style="" if index else "bold")
    return table


def describe_memory(needs: Sequence[MemoryNeed]) -> str:
    """Returns what each device needs of what it has, devices that are alike in one."""
    alike: dict[tuple[str, str], list[str]] = {}
    for need in needs:
        held = f" ({format_bytes(need.reserved_bytes)} reserved)" if need.reserved_bytes else ""
        alike.setdefault((format_bytes(need.need_bytes) + held, format_bytes(need.room_bytes)), []).append(need.device)
    parts = []
    for (need_text, room), names in alike.items():
        who = names[0] if len(names) == 1 else f"{len(names)} × {names[0]}…"
        parts.append(f"{who} {need_text} of {room}")
    return ", ".join(parts[:3]) + (f", {len(parts) - 3} more" if len(parts) > 3 else "")


def explain(best: RankedPlan, answer: PlanAnswer, *, by_price: bool = False) -> list[str]:
    """Returns why the winner won, what it decided, and what to buy or change first."""
    others = [found for found in answer.result.candidates if found is not best]
    found, cost = [f"'{best.plan.name}' wins: {best.bound}."], "costs {}× as much" if by_price else "takes {}× as long"
    if others:
        next_ = others[0]
        ratio = _score(next_, by_price) / _score(best, by_price) if _score(best, by_price) else 1.0
        if ratio < NEAR:
            found[0] += (
                f" '{next_.plan.name}' {cost.format(f'{ratio:.3f}')}; of plans within 1 % the simplest comes first."
            )
        else:
            found[0] += f" '{next_.plan.name}' {cost.format(f'{ratio:.2f}')}: {next_.bound}."
    found += [f"  {reason}" for reason in best.reasons]
    if not best.is_runnable:
        found.append(f"It is only costed: {best.only_costed}.")
    advice, left = answer.advice
    if advice:
        first, *rest = advice
        text = f"To change first: with {first.change}, {first.gain:.2f}× {'cheaper' if by_price else 'faster'}"
        more = "; ".join(f"with {a.change}, {a.gain:.2f}×" for a in rest[:3])
        found.append(f"{text} ({format_seconds(first.time_s)} an update){f'; {more}' if more else ''}.")
    elif not left:
        better = "cheaper" if by_price else "faster"
        found.append(f"Neither memory, links, a larger batch nor older weights would make it 2 % {better}.")
    if left:
        found.append(f"There was no time to see what it would be with {'; with '.join(left)}.")
    return found


def _score(found: RankedPlan, by_price: bool) -> float:
    return found.price if by_price else found.time_per_sample_s


def _notes(result: SearchResult, problem: PlanInputs) -> list[str]:
    looked = f"{result.num_estimated:,} estimated, {result.num_simulated} simulated, {format_seconds(result.time_s)}"
    whole = "" if result.is_complete else "; not all were looked at, so there may be better ones"
    return [*problem.notes, f"search: {result.searcher}, as {result.reason} ({looked}{whole})", *result.notes]


def _page(best: RankedPlan, answer: PlanAnswer, problem: PlanInputs, *, by_price: bool) -> str:
    program = compile_plan(best.plan, best.profile, best.machine)
    decisions = [(d.axis, d.choice, d.reason) for d in program.plan.decisions]
    choices = [
        Choice(
            name=found.plan.name,
            time_s=found.time_per_sample_s,
            share=found.fullest_share,
            memory=describe_memory(found.memory),
            bound=found.bound,
            is_winner=found is best,
        )
        for found in _different((*answer.result.candidates, *answer.leaner))
    ]
    title = f"{best.plan.name} · {problem.profile.name} on {problem.machine.name}"
    notes = [*(text.strip() for text in explain(best, answer, by_price=by_price)), *_notes(answer.result, problem)]
    return render_html(simulate(program).timeline(), title, program.plan.axes(), decisions, notes, choices)


def _different(candidates: Sequence[RankedPlan]) -> list[RankedPlan]:
    """Returns candidates without those whose plan came before."""
    return [found for n, found in enumerate(candidates) if found.plan not in [c.plan for c in candidates[:n]]]


def _form(best: RankedPlan, answer: PlanAnswer, problem: PlanInputs, request: PlanRequest) -> dict[str, object]:
    """Returns what was found as one object."""

    def candidate(found: RankedPlan) -> dict[str, Any]:
        form: dict[str, Any] = json.loads(found.model_dump_json(exclude={"machine", "profile", "plan"}))
        return form | {"plan": json.loads(found.plan.to_json()), "axes": found.plan.axes()}

    result = answer.result
    return {
        "profile": problem.profile.name,
        "machine": problem.machine.name,
        "batch": request.options.batch,
        "candidates": [candidate(found) for found in result.candidates],
        "leaner": [candidate(found) for found in answer.leaner],
        "explain": explain(best, answer, by_price=request.options.objective == "price"),
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
