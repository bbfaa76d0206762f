"""The audit replays the user's own model: what the units lost is found, and sound models are replayed to rounding."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipedejavu.engine import UncutModel, audit
from pipedejavu.session import Trainer
from tests.bugs.plain import ROUNDING, batch, make_trainer


def one(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (inputs,), {}


def audited(model: nn.Module, trainer: Trainer, said: list[str] | None = None, is_uncut: bool = True) -> float:
    """Trains one step, and returns the largest difference to its replay."""
    trainer.step(batch(1))
    trainer.batch.take(batch(1), first=0)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2).sum()

    say = [].append if said is None else said.append
    uncut = UncutModel(model, trainer.batch.own_inputs, one, loss, say) if is_uncut else None
    return max(audit(trainer.program, trainer._job, trainer.batch, trainer.threads.outcome(), uncut).values())


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            x = layer(x).tanh() * (1 + 0.1 * self.calls)
        return x


def test_a_lie_of_the_units_is_found_in_the_audit() -> None:
    model = Counter()
    before = copy.deepcopy(model)
    assert audited(before, make_trainer(model, check_model=False), is_uncut=False) < ROUNDING  # as it was: not seen
    model = Counter()
    before = copy.deepcopy(model)
    assert audited(before, make_trainer(model, check_model=False)) > 1e-3


class Mixed(nn.Module):
    """Dropout in and between its blocks, a tied weight, and a cast to a lower precision that a replay widens."""

    def __init__(self, cast: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.layers, self.drop = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), nn.Dropout(0.3)
        self.layers[3].weight = self.layers[0].weight
        self.cast = cast

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x)
        for layer in self.layers:
            x = x + self.drop(layer(self.drop(x)).tanh()).to(self.cast).double()
        return x


def chain() -> nn.Module:
    tied = nn.Linear(6, 6)
    parts = [tied, nn.Dropout(0.4), nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 6), tied]
    return nn.Sequential(*parts, nn.Dropout(0.1), nn.Linear(6, 6))


@pytest.mark.parametrize("make", [Mixed, chain])
@pytest.mark.parametrize("plan", ["1f1b", "ddp"])
def test_dropout_and_tied_weights_are_replayed_in_the_model_itself(make, plan) -> None:
    model, said = make(), list[str]()
    assert audited(copy.deepcopy(model), make_trainer(model, plan), said) < ROUNDING
    assert not said


def test_casts_to_a_lower_precision_are_widened() -> None:
    torch.manual_seed(1)
    model, said = Mixed(torch.float32), list[str]()
    wide = Mixed()
    wide.load_state_dict(model.state_dict())
    found = audited(copy.deepcopy(model), make_trainer(model), said)
    assert not said
    assert 1e-12 < found < 1e-6  # the run rounds to float32, and its replay does not
    assert audited(copy.deepcopy(wide), make_trainer(wide)) < ROUNDING


def test_a_tied_weight_that_is_read_at_two_versions_is_replayed_in_units_aloud() -> None:
    model, said = chain(), list[str]()
    assert audited(copy.deepcopy(model), make_trainer(model, "pipedream"), said) < ROUNDING
    assert said == [
        "the audit replays the model's units and not the model itself: its units read '6.weight' at different versions"
    ]
