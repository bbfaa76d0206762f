"""Writes docs/byzantine.md and draws docs/img/byzantine.svg: faulty replicas under a plain mean and under Zeno.

python docs/byzantine.py > docs/byzantine.md

Ten replicas, threads of this process, train the zoo's MLP on the digits with SGD; some hand over spoilt gradients.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch

from pipedejavu.engine import Applied, Byzantine, Job, Sgd, run_threads
from pipedejavu.facts import Machine, Profile
from pipedejavu.plan import Plan, preset
from pipedejavu.planner.measure import measure
from pipedejavu.planner.worker_host import make_machine, read_worker_hosts
from pipedejavu.profile import cut_model
from pipedejavu.program import compile as compile_plan
from pipedejavu.run.run_folder import result_of
from pipedejavu.source.task import SampleOrder, loss_of
from pipedejavu.zoo import build, open_data
from pipedejavu.zoo.mlp import MlpSize

PICTURE = Path(__file__).parent / "img" / "byzantine.svg"
REPLICAS, SAMPLES, STEPS, LR, LAST = 10, 16, 200, 0.1, 20
WIDTHS = (64, 64, 10)
FAULTS = (None, "4:sign-flip:10", "6:sign-flip:10", "4:scale:100", "4:random:100", "9:sign-flip:10")
DRAWN = "6:sign-flip:10"


class Run(NamedTuple):
    """One run's loss at every update, over the honest replicas, how well its weights do, and whom it dropped."""

    losses: list[float]
    accuracy: float
    caught: float | None
    """Share of the faulty contributions that were dropped."""


def plan_of(trim: int | None) -> Plan:
    """Returns the plain mean, or Zeno that drops so many."""
    name = "ddp" if trim is None else "zeno"
    return preset(name).at(workers=REPLICAS, microbatches=1, samples=SAMPLES, trim=trim)


def prepare(sizes: Sequence[int], byzantine: Byzantine | None = None) -> tuple[Job, SampleOrder]:
    """Returns the model as a job, and its samples; losses that are no numbers do not end it."""
    task = build("mlp", data="digits", widths=WIDTHS)
    cut = cut_model(task.model, task.data.batch(range(SAMPLES))[0])
    job = Job(units=cut.units, loss=loss_of(cut, task.loss), optimizer=Sgd(lr=LR), on_nan="skip", byzantine=byzantine)
    return job, SampleOrder(task, cut, sizes, seed=0)


def measure_once() -> tuple[Profile, Machine]:
    """Measures the model once, on as many workers as any plan has."""
    plan, machine = make_machine(plan_of(1), read_worker_hosts(REPLICAS + 1), "cpu")
    job, batches = prepare((SAMPLES,))
    make = batches.task.data.batch
    return measure("mlp", job, plan, batches.first, make, {"cpu": torch.device("cpu")}), machine


def train(known: tuple[Profile, Machine], fault: str | None, trim: int | None) -> Run:
    """Trains with so many faulty replicas; losses that are no numbers are recorded as such."""
    program = compile_plan(plan_of(trim), *known, fold=False)
    byzantine = Byzantine.parse(fault) if fault else None
    job, batches = prepare(program.sizes, byzantine)
    outcome = run_threads(program, job, batches, STEPS)
    honest = REPLICAS - (byzantine.count if byzantine else 0)
    found = {number: loss for log in outcome.logs for number, loss in log.losses.items()}
    losses = [sum(found[step * REPLICAS + q] for q in range(honest)) / (honest * SAMPLES) for step in range(STEPS)]
    caught = None
    if byzantine and trim is not None:
        applied = [event for event in outcome.logs[-1].events if isinstance(event, Applied)]
        kept = sum(i % REPLICAS >= honest for event in applied for i in event.microbatches)
        caught = 1 - kept / (STEPS * byzantine.count)
    return Run(losses, accuracy_of(result_of(program, outcome.weights)), caught)


def accuracy_of(weights: dict[str, torch.Tensor]) -> float:
    """Returns the share of the test digits that the weights get right."""
    task = build("mlp", data="digits", widths=WIDTHS)
    task.model.load_state_dict(weights)
    data = open_data("digits", MlpSize(widths=WIDTHS).form(), split="test")
    inputs, targets = data.batch(range(len(data)))
    with torch.no_grad():
        return float((task.model(inputs).argmax(1) == targets).float().mean())


def main() -> None:
    """Trains every row, prints the page and writes the picture."""
    torch.set_num_threads(1)
    known = measure_once()
    rows, drawn = [], {}
    for fault in FAULTS:
        byzantine = Byzantine.parse(fault) if fault else None
        count = byzantine.count if byzantine else 0
        runs = [train(known, fault, None), train(known, fault, count or 4)]
        rows.append(_row(byzantine, runs))
        if fault is None:
            drawn["no faults, mean"], drawn["no faults, Zeno drops 4"] = runs
        if fault == DRAWN:
            drawn["6 of 10 faulty, mean"], drawn["6 of 10 faulty, Zeno drops 6"] = runs
    print(PAGE.format(rows="\n".join(rows), replicas=REPLICAS, samples=SAMPLES, steps=STEPS, lr=LR, last=LAST), end="")
    PICTURE.write_text(draw(drawn), encoding="utf-8")


def _row(byzantine: Byzantine | None, runs: Sequence[Run]) -> str:
    name = f"{byzantine.count} × {byzantine.kind}, factor {byzantine.factor:g}" if byzantine else "none"
    cells = [f"{_loss(run)} | {run.accuracy:.1%}" for run in runs]
    caught = runs[1].caught
    return f"| {name} | {' | '.join(cells)} | {'–' if caught is None else f'{caught:.1%}'} |"


def _loss(run: Run) -> str:
    last = mean(run.losses[-LAST:])
    return f"{last:.3g}" if math.isfinite(last) else "no number"


PAGE = """# Faulty replicas

Made by `python docs/byzantine.py > docs/byzantine.md`.

A plain mean trusts every replica: one that sends wrong gradients, because of broken memory or on purpose, decides where
the weights go. The preset `zeno` (combiner `score-trim`) does not trust them. Its server receives each gradient u
separately, takes a step along it on a copy of the weights, and computes the loss f on its own samples:

    score(u) = −f(w − γu) − ργ|u|²

The server drops the `reduce.trim` lowest scores, every score that is not finite, and every gradient that is too large
for the optimizer's arithmetic. It averages the rest, and its optimizer makes the update. The published score also adds
the loss before the step, which is the same for all gradients and changes no choice, so it is not computed. γ is the
learning rate of the update and ρ is `reduce.penalty` (0.005). The samples are a microbatch of the same data in an order
of the server's own; a `Trainer` uses the last microbatch of its `sample`. Normalisation uses the statistics of that
microbatch, and dropout is the same for all gradients.

This costs one forward pass on the server per replica, after the last gradient has arrived, and each gradient is sent
whole; `simulate preset:zeno` shows both. One server must hold the whole model. `reduce.trim` must be at
least the number of faulty replicas, and one replica must be honest. Under AdamW γ is small compared with the actual
step, so a score depends on little more than the direction. That is enough against flipped signs and noise, and the
optimizer itself divides by the size.

    pipedejavu train zoo:mlp --data digits --plan preset:zeno --workers 5 --trim 2 \\
      --byzantine 2:sign-flip --optimizer sgd --lr 0.1

`--byzantine COUNT:KIND[:FACTOR]` makes the last COUNT replicas faulty, under any plan whose replicas send gradients:
`sign-flip` sends −FACTOR times the gradient, `scale` sends FACTOR times the gradient, `random` sends noise with FACTOR
times its size. FACTOR is 10 by default. The audit (`--audit`) replays the faults, every score and every choice.

A fault may be that of one stage: `COUNT:KIND[:FACTOR]@STAGE` spoils the weight gradients of one stage,
`@STAGE:activations` what its forwards pass on, and `@STAGE:errors` the gradients that its backwards pass on, in a
linear pipeline of any schedule. Replicated pipelines whose server combines by `score-trim` (a `chain` cut) have a score
per stage and replica: the step that is scored moves the weights of that stage alone, and a stage is dropped without the
rest of its replica. `pipedejavu reproduce faulty-stages` shows both ([experiments](reproduce.md)).

## Figures

The zoo's MLP (64, 64 and 10 wide) on the digits (1500 to train, 297 to test), {replicas} replicas of {samples}
samples, {steps} updates of SGD with a learning rate of {lr}. Zeno drops as many replicas as are faulty, and 4 if
none is. Loss: mean over the honest replicas and the last {last} updates.

| faulty of {replicas} | mean: loss | accuracy | Zeno: loss | accuracy | faulty ones dropped |
|---|---|---|---|---|---|
{rows}

![Loss with 6 of 10 replicas faulty: the mean leaves, Zeno follows the run without faults](img/byzantine.svg)

Dropping honest replicas costs samples: the row without faults trains on 6 of 10.
"""


# --- the picture: the loss of each update, on a logarithmic scale

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 360, 66, 18, 50, 306
LOWEST, HIGHEST = -3, 3
STYLE = """
  :root { --card: #ffffff; --ink: #1b222b; --soft: #5c6773; --line: #dfe3e8; --c0: #f2b774; --c1: #b9712a;
    --c2: #c9302a; --c3: #2a6fc9; }
  @media (prefers-color-scheme: dark) { :root { --card: #191e25; --ink: #e4e8ed; --soft: #98a3b0; --line: #2d343d;
    --c0: #b9712a; --c1: #f2b774; --c2: #ff7a70; --c3: #78aef5; } }
  text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--soft);
    font-variant-numeric: tabular-nums; }
  .title { font-size: 15px; font-weight: 600; fill: var(--ink); } .name { fill: var(--ink); }
  .grid { stroke: var(--line); } .curve { fill: none; stroke-linejoin: round; stroke-linecap: round; }
  .c0 { stroke: var(--c0); stroke-width: 5; } .c1 { stroke: var(--c1); stroke-width: 1.4; stroke-dasharray: 4 5; }
  .c2 { stroke: var(--c2); stroke-width: 2.4; } .c3 { stroke: var(--c3); stroke-width: 2.4; }
"""


def draw(runs: dict[str, Run]) -> str:
    """Returns the picture as SVG; a loss beyond the highest tick, or that is no number, leaves at the top."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        ' role="img" aria-labelledby="title">',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="var(--card)"></rect>',
        f'<text id="title" class="title" x="{LEFT}" y="28">Training loss with 6 of 10 replicas sending −10·g</text>',
    ]
    for tick in range(LOWEST, HIGHEST + 1):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{_y(tick):.1f}" y2="{_y(tick):.1f}"/>')
        parts.append(_text(f"{10.0**tick:g}", LEFT - 8, _y(tick) + 4, "end"))
    for number, run in enumerate(runs.values()):
        points = " ".join(f"{_x(step + 1):.1f},{y:.1f}" for step, y in enumerate(_heights(run.losses)))
        parts.append(f'<polyline class="curve c{number}" points="{points}"/>')
    parts += [_text(f"{step}", _x(step), BOTTOM + 18, "middle") for step in range(0, STEPS + 1, 50)]
    parts.append(_text("update", _x(STEPS / 2), BOTTOM + 40, "middle"))
    for number, name in enumerate(runs):
        x, y = WIDTH - RIGHT - 230, TOP + 22 + 20 * number
        parts.append(f'<line class="curve c{number}" x1="{x}" x2="{x + 34}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="name" x="{x + 44}" y="{y + 4}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _heights(losses: Sequence[float]) -> list[float]:
    """Returns where a curve is at each update, up to the one that leaves the picture."""
    found = []
    for loss in losses:
        power = math.log10(max(loss, 1e-12)) if math.isfinite(loss) else math.inf
        found.append(_y(min(max(power, LOWEST), HIGHEST)))
        if power > HIGHEST:
            break
    return found


def _x(step: float) -> float:
    return LEFT + step / STEPS * (WIDTH - LEFT - RIGHT)


def _y(power: float) -> float:
    return BOTTOM - (power - LOWEST) / (HIGHEST - LOWEST) * (BOTTOM - TOP)


def _text(text: str, x: float, y: float, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


if __name__ == "__main__":
    main()
