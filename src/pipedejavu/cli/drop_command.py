"""`plan --search genetic`: the table of filters to drop, and a plan that chooses from it."""

import json
from dataclasses import dataclass

from rich.table import Table

from pipedejavu.cli.input_files import read_model
from pipedejavu.cli.installed import require_torch
from pipedejavu.cli.terminal import print_json, terminal
from pipedejavu.facts import InputError
from pipedejavu.plan import preset
from pipedejavu.search import Progress

UPDATES = 40
"""Updates that each vector is trained for."""


@dataclass(frozen=True)
class DropRequest:
    """What `plan` was asked for."""

    model: str
    machine: str | None
    data: str | None
    samples: int
    seed: int
    time_budget_s: float
    out: str | None
    as_json: bool


def search_drop_table(request: DropRequest, progress: Progress) -> None:
    """Searches for the vectors of a model, and prints or writes the plan of preset 'distreal' with them."""
    is_model = request.model.startswith(("zoo:", "hf:")) or ".py:" in request.model
    if not is_model:
        raise InputError(f"--search genetic trains the model, and '{request.model}' is a profile; give zoo:NAME")
    if request.machine is not None:
        raise InputError("--search genetic trains the model here; leave --machine out")
    require_torch("training", "pip install 'pipedejavu[train]'")
    from pipedejavu.planner.drop_search import search_drops
    from pipedejavu.run import TrainOptions
    from pipedejavu.source.task import prepare

    plan = preset("distreal").at(samples=request.samples)
    options = TrainOptions(model=read_model(request.model), data=request.data, seed=request.seed)
    prepared = prepare(options, [plan.feed.samples])
    table = search_drops(prepared, plan, updates=UPDATES, time_budget_s=request.time_budget_s, progress=progress)
    plan = table.plan(plan)
    if request.out:
        plan.save(request.out)
    if request.as_json:
        files = [request.out] if request.out else []
        print_json({"table": json.loads(table.to_json()), "plan": json.loads(plan.to_json()), "files": files})
        return
    columns = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("computes", f"loss after {table.updates} updates", "drops"):
        columns.add_column(name, justify="right")
    for vector in table.vectors:
        columns.add_row(f"{vector.cost:.1%}", f"{vector.loss:.4f}", " ".join(f"{share:.2f}" for share in vector.drops))
    terminal().print(columns)
    terminal().print(
        f"\n{len(table.vectors)} of {table.tried} vectors are on the front; groups: {', '.join(table.groups)}"
    )
    if request.out:
        terminal().print(f"wrote {request.out}")
