"""Sound models agree with their units bit for bit on a CPU, with dropout, tied weights and running statistics."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipedejavu.engine import Job, Sgd
from pipedejavu.model_check import difference
from pipedejavu.model_check.check import Checked, Sample, check_model
from pipedejavu.plan import preset
from pipedejavu.profile import cut_model
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.source.model_source import own_loss
from pipedejavu.source.task import loss_of
from pipedejavu.zoo import build
from tests.engine.case import machine_of, profile_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _in_bits(monkeypatch) -> None:
    """Allows no rounding: whatever is not equal bit for bit is a difference."""
    monkeypatch.setattr(difference, "_rounding", lambda *given: [0.0] * len(given[-1]))


def program_of(job: Job, plan: str) -> Program:
    found = preset(plan).at(workers=2, microbatches=2)
    units = list(job.units)
    profile = profile_of(units, 0)
    if job.ties:
        profile = profile_of(units, 1)
    return compile_plan(found, profile, machine_of(found, "cpu"), fold=False)


def check(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], samples: list[tuple[Any, Any]], plan: str = "1f1b"
) -> str:
    cut = cut_model(model, samples[0][0])
    job = Job(units=cut.units, loss=loss_of(cut, loss), optimizer=Sgd(lr=0.1))
    program = program_of(job, plan)
    return check_model(Checked(model, cut, job, loss, program, [Sample(*s) for s in samples]), CPU)


@pytest.mark.parametrize("name", ["mlp", "gpt-tiny", "bert-tiny", "seq2seq-tiny", "moe-tiny"])
def test_models_of_the_zoo_agree(name) -> None:
    task = build(name, seed=0)
    assert not check(task.model, task.loss, [task.data.batch(range(2)), task.data.batch(range(2, 4))])


def test_a_convolutional_network_with_running_statistics_agrees() -> None:
    blocks = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Dropout(0.2), nn.Linear(48, 4))
    samples = [(torch.randn(2, 3, 4, 4), torch.randn(2, 4)) for _ in range(2)]
    for plan in ("1f1b", "gpipe-recompute", "zb-h1"):
        assert not check(model, lambda output, target: ((output - target) ** 2).sum(), samples, plan)


def tokens(seed: int) -> tuple[dict[str, Tensor], Tensor]:
    ids = torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}, ids


SIZES = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (
            "GPT2LMHeadModel",
            {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0},
        ),
        ("BertForMaskedLM", SIZES),
        ("LlamaForCausalLM", {**SIZES, "attention_dropout": 0.1}),
    ],
)
def test_models_of_transformers_with_dropout_agree(kind, options) -> None:
    transformers = pytest.importorskip("transformers")
    cls = getattr(transformers, kind)
    model = cls(cls.config_class(**options)).train()
    model.config.use_cache = False
    assert not check(model, own_loss, [tokens(0), tokens(1)], "gpipe-recompute")


class Tied(nn.Module):
    """Shares its embedding with its head, has dropout in between and noise of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.drop = nn.Embedding(9, 4), nn.Dropout(0.3)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        value = self.embedding(x)
        for layer in self.layers:
            value = value + self.drop(layer(value).tanh()) + 0.1 * torch.randn_like(value)
        return self.norm(value) @ self.embedding.weight.T


def test_tied_weights_noise_and_statistics_agree_when_recorded() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target, reduction="sum")

    random = torch.Generator().manual_seed(0)
    samples = [tuple(torch.randint(0, 9, (2, 5), generator=random)) for _ in range(2)]
    assert not check(Tied(), loss, samples)
