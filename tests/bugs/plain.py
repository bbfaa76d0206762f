"""A plain loop over a user's own, uncut model, which runs of the Trainer are compared with."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipedejavu.engine import Sgd
from pipedejavu.session import Trainer

LR, STEPS, BATCH = 0.05, 3, 8
ROUNDING = 1e-13
"""Sums of a few float64 gradients of size one, over a few updates."""


def sum_of_squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum()


def batch(seed: int, width: int = 6) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, width, generator=random), torch.randn(BATCH, width, generator=random)


def trained_plainly(model: nn.Module, microbatches: int = 1) -> dict[str, Tensor]:
    """Trains a copy of a model as a user would, and returns its state; the optimizer is given frozen parameters too."""
    own = copy.deepcopy(model)
    optimizer = torch.optim.SGD(own.parameters(), lr=LR)
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            (sum_of_squares(own(x), y) / BATCH).backward()
        optimizer.step()
    return own.state_dict()


def make_trainer(model: nn.Module, plan: str = "1f1b", **options: object) -> Trainer:
    return Trainer(model, sum_of_squares, sample=batch(0), plan=plan, workers=2, optimizer=Sgd(lr=LR), **options)


def trained(model: nn.Module, plan: str = "1f1b", **options: object) -> dict[str, Tensor]:
    """Trains a copy of a model with a Trainer, and returns its state."""
    trainer = make_trainer(copy.deepcopy(model), plan, **options)
    for step in range(STEPS):
        trainer.step(batch(step))
    return trainer.save_to_model().state_dict()


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def far_from_start(model: nn.Module, expected: dict[str, Tensor]) -> float:
    start = model.state_dict()
    return max(float((start[name] - expected[name]).abs().max()) for name in expected)


Make = Callable[[], nn.Module]
