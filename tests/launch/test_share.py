"""Shares that move while a run goes on: what is compared and replayed is what ran."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file

from pipedejavu.launch import audit_run, launch, plan_run, train
from pipedejavu.plan import preset
from pipedejavu.profile import cut_model
from pipedejavu.run import TrainOptions
from pipedejavu.source.task import SampleOrder
from pipedejavu.zoo import build

MOVING = """
from pipedejavu.launch import worker

def work(rank, size, launched):
    worker.adjusted_counts = lambda counts, times, bounds: (4, 5, 15)
    worker.work(rank, size, launched)
"""


OWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Skips(nn.Module):  # no chain: it is recorded for each size of a microbatch
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        start = x
        for block in self.blocks:
            x = x + block(x).tanh() * start
        return x

def make():
    x = torch.randn(64, 6)
    return Skips(), lambda output, target: (output - target).square().sum(), TensorDataset(x, x.flip(1))
"""


EXACT = TrainOptions(model="mlp", data="random:64", dtype="float64", keeps_log=True, steps=3, optimizer="sgd")


@pytest.mark.parametrize("is_own", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["chain", "cut"])
def test_the_forecast_is_of_the_program_that_ran_last(tmp_path, monkeypatch, is_own) -> None:
    (tmp_path / "moving.py").write_text(MOVING)
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(launch, "work", __import__("moving").work)
    plan = preset("hyscale").at(workers=2, samples=3, microbatches=8)
    plan = plan.replace(feed=plan.feed.replace(shares=(0.25, 0.25, 0.5)))  # two, two and four microbatches
    given = EXACT.replace(model=f"{tmp_path}/own.py:make", data=None) if is_own else EXACT
    options, program, _ = plan_run(given, plan)
    done = train(options, program, str(tmp_path / "run"))
    assert max(audit_run(done).values()) < 1e-12  # a few units in the last place, for each of the updates
    predicted, measured = (done.folder.timeline(origin) for origin in ("predicted", "measured"))
    assert sorted(predicted.action) == sorted(measured.action)
    assert [sum(part) for part in done.prediction.program.parts] == [4, 5, 15]
    assert [update for update, _ in done.moves] == [1]
    rows = [json.loads(line) for line in done.folder.metrics.read_text().splitlines()]
    assert [row["shares"] for row in rows if "shares" in row] == [[4 / 24, 5 / 24, 15 / 24]]
    assert [row["count"] for row in rows if "loss" in row] == [24] * 3


@pytest.mark.parametrize(
    ("shares", "parts"),
    [
        ((0.8, 0.2), ((4, 4), (2,))),
        pytest.param((1.0, 0.0), ((5, 5), ()), marks=pytest.mark.slow),
        pytest.param((0.0, 1.0), ((), (5, 5)), marks=pytest.mark.slow),
    ],
)
def test_parts_of_any_size_train_and_equal_their_replay(tmp_path, shares, parts) -> None:
    plan = preset("coarse").at(workers=1, samples=5, microbatches=2)
    plan = plan.replace(feed=plan.feed.replace(shares=shares, is_controlled=False))
    options, program, _ = plan_run(EXACT, plan)
    assert program.parts == parts
    done = train(options, program, str(tmp_path / "run"))
    assert max(audit_run(done).values()) < 1e-12
    assert set(load_file(done.folder.model)) == {
        f"layer{n}.linear.{what}" for n in range(4) for what in ("weight", "bias")
    }


def test_microbatches_keep_their_samples_apart_when_their_sizes_change() -> None:
    task = build("mlp")
    order = SampleOrder(task, cut_model(task.model, task.data.batch(range(2))[0]), (3, 2, 1), seed=0)
    order.change(2, (1, 1, 4))
    found = [[*order.numbers(n)] for n in range(9)]
    assert [len(numbers) for numbers in found] == [3, 2, 1, 3, 2, 1, 1, 1, 4]
    assert [n for numbers in found for n in numbers] == [*range(18)]
