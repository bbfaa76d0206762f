"""Ranks that divide operators, under torchrun: on one host, on two, and with another number of ranks afterwards."""

import json
import sys
from pathlib import Path
from typing import Literal

import pytest

from pipedejavu.plan import Plan
from pipedejavu.plan.axis import Cut, Feed, Keep, Order, Place, Reduce
from tests.launch.test_torchrun import TORCHRUN, start_on_hosts
from tests.processes import Processes

MODEL = """
import torch
from torch import nn


def make():
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1))]
    random = torch.Generator().manual_seed(1)
    rows = [(torch.randn(8, generator=random), torch.randn(4, generator=random)) for _ in range(32)]
    return nn.Sequential(*layers, nn.Linear(8, 4)), nn.MSELoss(), rows
"""
TRAIN = ("-m", "pipedejavu", "train", "model.py:make", "--optimizer", "sgd", "--lr", "0.1", "--precision", "fp64")
RUN = ("--clip-norm", "1", "--checkpoint-every", "2", "--audit", "--json", "--run-dir", "run")


def write(folder: Path, place: Place, keep: Keep | None = None) -> None:
    wire: Literal["all-reduce", "none"] = "all-reduce" if place.replicas > 1 else "none"
    plan = Plan(
        name="divided",
        cut=Cut(kind="chain") if place.workers > 1 else Cut(),
        place=place,
        feed=Feed(microbatches=2, samples=4),
        order=Order(kind="1f1b" if place.workers > 1 else "step"),
        reduce=Reduce(wire="reduce-scatter" if keep else wire),
        keep=keep or Keep(),
    )
    folder.mkdir(exist_ok=True)
    (folder / "model.py").write_text(MODEL)
    plan.save(folder / "plan.json")


def check(out: str) -> None:
    form = json.loads(out)
    assert form["audit"]["largest_difference"] < 1e-12


ZERO = Place(replicas=2, stage_shards=(2,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "keep"),
    [(Place(workers=2, stage_shards=(2, 2)), None), (ZERO, Keep(kind="zero-1")), (ZERO, Keep(kind="zero-3"))],
    ids=["1f1b", "zero-1", "zero-3"],
)
def test_four_ranks_train_and_one_process_goes_on(
    tmp_path: Path, processes: Processes, place: Place, keep: Keep | None
) -> None:
    write(tmp_path, place, keep)
    command = (*TORCHRUN, "--nproc-per-node", "4", *TRAIN, "--steps", "2", "--plan", "plan.json", *RUN)
    code, out, err = processes.run(command, tmp_path)
    assert code == 0, err
    check(out)
    write(tmp_path, Place())
    resumed = (sys.executable, *TRAIN, "--steps", "4", "--plan", "plan.json", "--resume", *RUN[:4], *RUN[-3:])
    code, out, err = processes.run(resumed, tmp_path)
    assert code == 0, err
    assert json.loads(out)["steps"] == 4


@pytest.mark.slow
def test_eight_ranks_divide_stages_and_replicas(tmp_path: Path, processes: Processes) -> None:
    write(tmp_path, Place(workers=2, replicas=2, stage_shards=(2, 2)))
    command = (*TORCHRUN, "--nproc-per-node", "8", *TRAIN, "--steps", "2", "--plan", "plan.json", *RUN)
    code, out, err = processes.run(command, tmp_path)
    assert code == 0, err
    check(out)


@pytest.mark.slow
def test_two_hosts_divide_each_stage_on_a_host_of_its_own(tmp_path: Path, processes: Processes, two_hosts) -> None:
    for name in two_hosts[0]:
        write(tmp_path / name, Place(workers=2, stage_shards=(2, 2)))
    started = start_on_hosts(processes, tmp_path, two_hosts, (*TRAIN, "--steps", "2", "--plan", "plan.json", *RUN))
    (code, out, err), (other_code, _, other_err) = [processes.finish(p) for p in started]
    assert code == 0, err
    assert other_code == 0, other_err
    check(out)
    assert "gloo (the ranks are not processes of one host)" in err
