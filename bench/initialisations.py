"""Whether several initialisations pay: the best of N candidates against one, with as many updates in all.

    python bench/initialisations.py [--seeds 8] [--candidates 8] [--init-steps 50] [--steps 400] [--model mlp]

For each model and seed, N candidates compete as `train --init-candidates` lets them, in one process, and the winner
goes on until all together have made `steps` updates. Beside it the run's own seed, alone, makes all of them itself.
Both are judged by their mean loss on samples of the test split. What choosing is worth where it costs nothing is the
winner's loss once it has made as many updates itself.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from pipedejavu.launch import plan_run
from pipedejavu.launch.init_trial import InitTrial, run_init_trials
from pipedejavu.plan import preset
from pipedejavu.program import Program
from pipedejavu.reproduce.seed_interval import describe_mean
from pipedejavu.run import TrainOptions
from pipedejavu.source.task import prepare
from pipedejavu.zoo import build, open_data
from pipedejavu.zoo.mlp import MlpSize
from pipedejavu.zoo.transformer import TransformerSize
from pipedejavu.zoo.vgg import VggSize

Made = tuple[nn.Module, Callable[[Any, Any], Tensor], list[tuple[Any, Any]]]
"""A model, its loss and its samples, as `FILE.py:FUNCTION` returns them."""

TRAIN, TEST = 1500, 200
"""Samples that runs train on, and are judged by."""

SIZES: dict[str, dict[str, Any]] = {
    "mlp": {"data": "digits", "widths": (64, 64, 10)},
    "vgg-small": {"data": "digits", "stages": ((8,), (16,)), "side": 8, "channels": 1},
    "gpt-tiny": {"data": "stdlib", "layers": 2, "width": 64, "context": 32},
}


class Setting(NamedTuple):
    """How a model is trained."""

    model: str
    samples: int
    optimizer: Literal["sgd", "adamw"]
    lr: float


SETTINGS = (
    Setting("mlp", 16, "sgd", 0.1), Setting("vgg-small", 16, "adamw", 1e-3), Setting("gpt-tiny", 8, "adamw", 1e-3),
)  # fmt: skip


def mlp() -> Made:
    """Returns a small MLP and the digits."""
    return make("mlp")


def vgg() -> Made:
    """Returns a small VGG and the digits."""
    return make("vgg-small")


def gpt() -> Made:
    """Returns a small GPT and the standard library's text."""
    return make("gpt-tiny")


def make(model: str) -> Made:
    """Returns a model of the zoo, in a small size, from the seed that torch was given."""
    task = build(model, seed=torch.initial_seed(), **SIZES[model])
    inputs, targets = task.data.batch(range(TRAIN))
    return task.model, task.loss, [*zip(inputs, targets, strict=True)]


class Row(NamedTuple):
    """One seed: test losses of equal cost, that of the winner with as many updates of its own, and the race's cost."""

    alone: float
    winner: float
    as_long: float
    spent: int
    """Updates of candidates that were dropped."""
    ended: int
    """Updates of the winner when the race was over."""


def loss_of(model: str, candidate: InitTrial) -> float:
    """Returns the mean loss of a candidate on samples of the test split, for each target."""
    size = {name: value for name, value in SIZES[model].items() if name != "data"}
    task = build(model, **SIZES[model])
    state = {name.partition("/")[2]: tensor for name, tensor in candidate.state().items() if "state/" not in name}
    task.model.load_state_dict(state, strict=False)
    task.model.eval()
    form = {"mlp": MlpSize, "vgg-small": VggSize, "gpt-tiny": TransformerSize}[model](**size).form()
    data = open_data(SIZES[model]["data"], form, split="test")
    inputs, targets = data.batch(range(min(TEST, len(data))))
    with torch.no_grad():
        return float(task.loss(task.model(inputs), targets)) / task.count(targets)


def run(model: str, options: TrainOptions, program: Program) -> Row:
    """Trains one seed both ways."""
    selection, winner = run_init_trials(options, program, 0, 1, lambda _: None)
    assert winner is not None
    spent = sum(len(losses) for number, losses in enumerate(selection.losses) if number != selection.winner)
    for _ in range(selection.updates, options.steps - spent):
        winner.step()
    reached = loss_of(model, winner)
    for _ in range(max(selection.updates, options.steps - spent), options.steps):
        winner.step()
    alone = InitTrial(options, program, 0, 0, prepare(options, program.sizes).batches)
    for _ in range(options.steps):
        alone.step()
    return Row(loss_of(model, alone), reached, loss_of(model, winner), spent, selection.updates)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all models and prints the table of docs/initialisations.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument("--init-steps", type=int, default=50)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--model", choices=[setting.model for setting in SETTINGS], help="one of them alone")
    asked = parser.parse_args(arguments)
    lines = []
    for setting in [setting for setting in SETTINGS if asked.model in (None, setting.model)]:
        function = setting.model.partition("-")[0]
        options = TrainOptions(
            model=f"{Path(__file__).resolve()}:{function}", optimizer=setting.optimizer, lr=setting.lr,
            steps=asked.steps, init_candidates=asked.candidates, init_steps=asked.init_steps, checkpoint_every=0,
        )  # fmt: skip
        plan = preset("ddp").at(workers=1, microbatches=1, samples=setting.samples)
        program = plan_run(options, plan, devices="cpu").program
        torch.set_num_threads(1)
        rows = []
        for number in range(asked.seeds):
            rows.append(run(setting.model, options.replace(seed=1000 * number), program))
            print(setting.model, number, rows[-1], file=sys.stderr)
        lines.append(describe(setting, rows))
    print(HEAD, *lines, sep="\n")


HEAD = """\
| model | one | winner | winner, as long | gain at equal cost | seeds won | gain as long | updates spent / ended |
|---|---|---|---|---|---|---|---|"""


def describe(setting: Setting, rows: Sequence[Row]) -> str:
    """Returns a model's line of the table."""
    gains, free = [row.alone - row.winner for row in rows], [row.alone - row.as_long for row in rows]
    losses = " | ".join(f"{fmean(column):.3f}" for column in [*zip(*rows, strict=True)][:3])
    won = f"{sum(gain > 0 for gain in gains)} of {len(rows)}"
    cost = f"{fmean(row.spent for row in rows):.0f} / {fmean(row.ended for row in rows):.0f}"
    kind = f"{setting.optimizer}, lr {setting.lr:g}, batch {setting.samples}"
    at_equal_cost, as_long = (describe_mean(values, sign=True) for values in (gains, free))
    return f"| {setting.model} ({kind}) | {losses} | {at_equal_cost} | {won} | {as_long} | {cost} |"


if __name__ == "__main__":
    main()
