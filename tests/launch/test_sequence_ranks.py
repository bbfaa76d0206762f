"""Ranks that divide sequences, vocabularies or experts, and runs that go on under other plans."""

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.launch.test_torchrun import TORCHRUN
from tests.processes import Processes

MODEL = """
import torch
from torch import nn
from pipedejavu.zoo.gpt import Gpt
from pipedejavu.zoo.transformer import TransformerSize


def loss(logits, target):
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1)


def make():
    size = TransformerSize(layers=2, width=16, heads=4, context=16, vocabulary=32, dropout=0.1, is_tied=True)
    random = torch.Generator().manual_seed(1)
    rows = [tuple(torch.randint(0, 32, (2, 16), generator=random)) for _ in range(23)]
    return Gpt(size), loss, rows
"""
TRAIN = ("-m", "pipedejavu", "train", "model.py:make", "--optimizer", "sgd", "--lr", "0.1", "--precision", "fp64")
EACH = ("--clip-norm", "0.5", "--checkpoint-every", "2", "--json")


def train(folder: Path, processes: Processes, *options: str, ranks: int = 0) -> dict:
    start = (*TORCHRUN, "--nproc-per-node", str(ranks)) if ranks else (sys.executable,)
    code, out, err = processes.run((*start, *TRAIN, *EACH, *options), folder)
    assert code == 0, err
    form: dict = json.loads(out)
    return form


def differ(folder: Path, one: str, other: str) -> float:
    first, second = (load_file(folder / name / "model.safetensors") for name in (one, other))
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sequence", "vocabulary", "context"])
def test_ranks_train_and_other_plans_go_on(tmp_path: Path, processes: Processes, name: str) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    # 23 samples in updates of five: the last of an epoch is short.
    plan = ("--plan", f"preset:{name}", "--samples", "5", "--microbatches", "1")
    whole = train(tmp_path, processes, *plan, "--workers", "2", "--steps", "6", "--audit", "--run-dir", "whole")
    assert whole["audit"]["largest_difference"] < 1e-12
    first = train(tmp_path, processes, *plan, "--steps", "4", "--audit", "--run-dir", "parts", ranks=4)
    assert first["audit"]["largest_difference"] < 1e-12
    single = ("--plan", "preset:ddp", "--workers", "1", "--samples", "5", "--microbatches", "1")
    train(tmp_path, processes, *single, "--steps", "5", "--resume", "--run-dir", "parts")
    train(tmp_path, processes, *plan, "--workers", "2", "--steps", "6", "--resume", "--run-dir", "parts")
    assert differ(tmp_path, "whole", "parts") <= 1e-12


EXPERTS = """
from functools import partial

import torch
from pipedejavu.zoo.loss import balanced_cross_entropy
from pipedejavu.zoo.moe import Moe, MoeSize


def make():
    size = MoeSize(layers=2, width=16, heads=2, context=8, vocabulary=32, experts=4)
    random = torch.Generator().manual_seed(1)
    rows = [tuple(torch.randint(0, 32, (2, 8), generator=random)) for _ in range(32)]
    return Moe(size), partial(balanced_cross_entropy, coefficient=0.01), rows
"""


@pytest.mark.slow
def test_another_number_of_ranks_divides_the_experts(tmp_path: Path, processes: Processes) -> None:
    (tmp_path / "model.py").write_text(EXPERTS)
    options = ("--plan", "preset:moe", "--samples", "2")
    four = (*options, "--workers", "4", "--microbatches", "1")
    train(tmp_path, processes, *four, "--steps", "3", "--run-dir", "whole")
    train(tmp_path, processes, *four, "--steps", "2", "--run-dir", "parts")
    two = (*options, "--workers", "2", "--microbatches", "2", "--resume", "--run-dir", "parts")
    train(tmp_path, processes, *two, "--steps", "3")
    assert differ(tmp_path, "whole", "parts") <= 1e-12
