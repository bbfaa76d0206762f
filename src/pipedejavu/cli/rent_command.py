"""The verb `rent`: compares machines that could be rented, by the time and the cost of a whole training on each."""

import json
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.table import Table

from pipedejavu.cli.input_files import AsJson, PlannedModel, Speeds, read_amounts
from pipedejavu.cli.plan_command import PlanInputs, PlanRequest, read_inputs, show_progress
from pipedejavu.cli.terminal import print_json, styled, terminal
from pipedejavu.facts import InputError, Machine, Profile
from pipedejavu.search import Rental, SearchOptions, SearchResult, TrainingGoal, compare_rentals, search


@dataclass(frozen=True)
class RentRequest:
    """The arguments and options of `rent`."""

    model: PlannedModel
    machine: Annotated[
        list[str], typer.Option(help="A machine file, or a text such as '8xa100-80gb'; once per machine to compare.")
    ]
    train_samples: Annotated[int, typer.Option(help="Samples of the whole training.")]
    batch: Annotated[int, typer.Option(help="Samples per update.")] = 32
    price: Annotated[
        list[str] | None, typer.Option(help="Price per hour of a kind of device, such as a100-80gb=2.5; repeatable.")
    ] = None
    deadline: Annotated[float | None, typer.Option(help="Hours by which the training must end.")] = None
    failures: Annotated[
        list[str] | None,
        typer.Option(help="Mean hours between failures of a kind of device, such as a100-80gb=500; repeatable."),
    ] = None
    energy: Annotated[
        float, typer.Option(help="Price per kWh; devices count with the power that their vendors state.")
    ] = 0.0
    power: Annotated[
        list[str] | None, typer.Option(help="Power of a kind of device in watts, such as a100-80gb=350; repeatable.")
    ] = None
    speed: Speeds = None
    time_budget: Annotated[float, typer.Option(help="Seconds for the search, per machine.")] = 30.0
    precision: Annotated[
        str, typer.Option(help="For a model that is estimated: as for 'train', such as bf16 or 'bf16, int8 moments'.")
    ] = "auto"
    as_json: AsJson = False

    def goal(self) -> TrainingGoal:
        """Returns what is to be trained, by when, and how often devices fail."""
        failures = read_amounts("failures", self.failures)
        if never := [kind for kind, hours in failures.items() if not hours]:
            raise InputError(f"--failures gives '{never[0]}' 0 hours, so that it never trains; give more")
        return TrainingGoal(
            samples=self.train_samples,
            deadline_s=None if self.deadline is None else 3600 * self.deadline,
            failure_s={kind: 3600 * hours for kind, hours in failures.items()},
            energy_price=self.energy,
            power_w=read_amounts("power", self.power),
        )


def run(request: RentRequest) -> None:
    """Searches a plan for each machine, and prints the machines, the best to rent first."""
    goal, prices = request.goal(), read_amounts("price", request.price)
    with show_progress() as progress:
        problems = []
        for text in request.machine:
            one = PlanRequest(
                model=request.model, machine=text, speed=request.speed, batch=request.batch,
                time_budget=request.time_budget, precision=request.precision,
            )  # fmt: skip
            problems.append(read_inputs(one, one.search_options(), progress))
        every = {(problem.profile.name, problem.machine.name): problem for problem in problems}
        if len(every) < len(problems):
            raise InputError("a machine is given twice; give each --machine once")

        def search_one(profile: Profile, machine: Machine, options: SearchOptions) -> SearchResult:
            asked = every[profile.name, machine.name].options
            return search(profile, machine, asked.replace(candidates=1, prices=options.prices), progress)

        pairs = [(problem.profile, problem.machine) for problem in problems]
        rentals = compare_rentals(pairs, SearchOptions(batch=request.batch, prices=prices), goal, search_one)
    if request.as_json:
        print_json({"rentals": [_form(rental) for rental in rentals], "conclusion": conclude(rentals, goal)})
        return
    _print(rentals, problems[0], goal, has_price=bool(prices or goal.energy_price))


def _form(rental: Rental) -> dict[str, object]:
    form: dict[str, object] = json.loads(rental.model_dump_json(exclude={"best"}))
    if rental.best is None:
        return form | {"plan": None, "time_s": None, "cost": None}
    return form | {
        "plan": rental.best.plan.name, "update_s": rental.best.time_s, "cost": rental.cost,
        "energy_kwh": rental.energy_kwh,
    }  # fmt: skip


def _print(rentals: tuple[Rental, ...], problem: PlanInputs, goal: TrainingGoal, *, has_price: bool) -> None:
    console = terminal(soft_wrap=True)
    console.print(
        styled(problem.profile.name, "bold"),
        f"for {goal.samples:,} samples, {problem.options.batch} per update\n",
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = ["samples/s", "time", *(["lost to failures"] if goal.failure_s else [])]
    columns += [*(["kWh"] if goal.energy_price else []), *(["cost"] if has_price else [])]
    table.add_column("machine")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("plan")
    for index, rental in enumerate(rentals):
        table.add_row(*_cells(rental, goal, has_price=has_price), style="" if index else "bold")
    width = console.measure(table, options=console.options.update(width=500)).maximum
    terminal(width=max(width, console.width)).print(table)
    console.print(f"\n{conclude(rentals, goal)}")
    for note in dict.fromkeys(problem.notes):
        console.print(note, style="dim")


def _cells(rental: Rental, goal: TrainingGoal, *, has_price: bool) -> list[str]:
    best, more = rental.best, bool(goal.failure_s) + bool(goal.energy_price) + has_price
    if best is None:
        return [rental.machine, *["–"] * (2 + more), rental.refusal]
    lost = [f"{rental.lost_share:.1%}"] * bool(goal.failure_s) + [f"{rental.energy_kwh:,.0f}"] * bool(goal.energy_price)
    late = "" if rental.is_in_time else " (late)"
    cost = [f"{rental.cost:,.2f}"] * has_price
    return [
        rental.machine, f"{best.samples / best.time_s:.4g}", f"{rental.time_s / 3600:,.2f} h{late}", *lost, *cost,
        best.plan.name,
    ]  # fmt: skip


def conclude(rentals: tuple[Rental, ...], goal: TrainingGoal) -> str:
    """Returns a sentence that says which machine to rent, and what the soonest would cost instead."""
    first = rentals[0]
    if first.best is None:
        return "The model fits none of them."
    soonest = min((rental for rental in rentals if rental.best), key=lambda rental: rental.time_s)
    if not first.is_in_time:
        assert goal.deadline_s is not None
        return (
            f"None of them ends within {goal.deadline_s / 3600:g} h; {soonest.machine} comes nearest, with"
            f" {soonest.time_s / 3600:.2f} h."
        )
    if not first.cost:
        return f"{first.machine} is the soonest, with {first.time_s / 3600:.2f} h (--price adds costs)."
    text = f"{first.machine} is the cheapest{' in time' if goal.deadline_s else ''}"
    if soonest is first:
        return f"{text}, and the soonest."
    faster, dearer = first.time_s / soonest.time_s, soonest.cost / first.cost
    return f"{text}; {soonest.machine} is {faster:.2f}× as fast and costs {dearer:.2f}× as much."
