"""Beside torch.optim.AdamW on float32 masters with clip_grad_norm_: the same up to rounding, and one state for both.

The loss is linear in the weights, so that both get the same gradients, whatever their weights: all magnitudes lie
between 1/2 and 3/2, and the clipping factors of any two steps within a factor of 3. So moments are made of values x
with a ≤ |x| ≤ b, b/a ≤ 3 without clipping and 9 with it.

The bound, with u = 2⁻²⁴ the error of one rounding, after T steps, to first order in u and rounded up:
- x has a relative error e: 0 without clipping, else (n + 8)·u, of the norm of n elements in any order of summation;
- each step adds at most 2ub to the first moment, which decays: at most b(2u/(1 − β₁) + e) after its correction;
- each step adds at most 3u to the relative error of the second moment: (3T·u + 2e), and half of it in the root;
- so the direction, at most b/a, is off by (b/a)(2u/(1 − β₁) + 2e + 1.5T·u + 10u), the last for single operations;
- a step scales that by lr, and rounds the weight three times: 3uW, with W the largest weight.
Both optimizers may be off by T such steps.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

U = 2.0**-24
STEPS, LR, BETAS = 20, 0.01, (0.9, 0.99)
SIZES = [7, 30, 12, 1]


class Probe(nn.Module):
    """A block whose gradient is what it is given."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


class Probes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.blocks = nn.ModuleList(Probe(size) for size in SIZES)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([block(g) for block, g in zip(self.blocks, gradients, strict=True)]).sum()


def gradients_of(step: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    signs = [torch.randint(0, 2, (size,), generator=generator) * 2 - 1 for size in SIZES]
    return [(sign * (0.5 + torch.rand(len(sign), generator=generator))).to(dtype) for sign in signs]


def run_hybrid(model: Probes, optimizer: Any, steps: range) -> None:
    for n in steps:
        model(gradients_of(n, model.blocks[0].weight.dtype)).backward()
        optimizer.step()
    optimizer.synchronize()


def run_torch(
    model: Probes, optimizer: torch.optim.Optimizer, steps: range, clip_norm: float | None, dtype: torch.dtype
) -> None:
    """Trains float32 masters with gradients of any precision."""
    for n in steps:
        for p, gradient in zip(model.parameters(), gradients_of(n, dtype), strict=True):
            p.grad = gradient.float()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()


def largest_of(model: Probes) -> float:
    """Returns the largest weight on the way: the last ones, and T steps of at most 9 lr back."""
    return max(p.detach().abs().max().item() for p in model.parameters()) + 9 * STEPS * LR


def off(one: Tensor, other: Tensor) -> float:
    return (one.detach().double() - other.detach().double()).abs().max().item()


def bound(clip_norm: float | None, largest: float) -> float:
    ratio, e = (3, 0.0) if clip_norm is None else (9, (sum(SIZES) + 8) * U)
    direction = ratio * (2 * U / (1 - BETAS[0]) + 2 * e + 1.5 * STEPS * U + 10 * U)
    return 2 * STEPS * (LR * direction + 3 * U * largest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_masters_are_those_of_torch_up_to_rounding(
    weight_decay: float, clip_norm: float | None, dtype: torch.dtype, lab: Any, bits: Any, masters: Any
) -> None:
    settings = {"lr": LR, "betas": BETAS, "eps": 1e-8, "weight_decay": weight_decay}
    ours = Probes().to(dtype)
    theirs = copy.deepcopy(ours).float()
    optimizer = lab.hybrid(ours, clip_norm=clip_norm, gpu_units=2, **settings)
    run_hybrid(ours, optimizer, range(STEPS))
    run_torch(theirs, torch.optim.AdamW(theirs.parameters(), **settings), range(STEPS), clip_norm, dtype)
    found = bits(optimizer, ours)
    largest = largest_of(theirs)
    for name, p in theirs.named_parameters():
        assert off(masters(found, name), p) <= bound(clip_norm, largest), name
    moved = max(off(p, q) for p, q in zip(Probes().parameters(), theirs.parameters(), strict=True))
    assert moved > 1000 * bound(clip_norm, largest)  # the bound says something


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_state_goes_to_torch_and_back(clip_norm: float | None, lab: Any) -> None:
    """Ten steps here and ten in torch, or the other way round, are twenty of torch."""
    settings = {"lr": LR, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.1}
    half = STEPS // 2
    whole = Probes()
    run_torch(whole, torch.optim.AdamW(whole.parameters(), **settings), range(STEPS), clip_norm, torch.float32)

    ours, theirs = Probes(), Probes()
    hybrid = lab.hybrid(ours, clip_norm=clip_norm, gpu_units=1, **settings)
    run_hybrid(ours, hybrid, range(half))
    theirs.load_state_dict(ours.state_dict())
    wrong = torch.optim.AdamW(theirs.parameters(), lr=1.0)  # all settings come with the state
    wrong.load_state_dict(copy.deepcopy(hybrid.state_dict()))
    run_torch(theirs, wrong, range(half, STEPS), clip_norm, torch.float32)

    first, second = Probes(), Probes()
    torchs = torch.optim.AdamW(first.parameters(), **settings)
    run_torch(first, torchs, range(half), clip_norm, torch.float32)
    second.load_state_dict(first.state_dict())
    back = lab.hybrid(second, clip_norm=clip_norm, gpu_units=1, lr=1.0, weight_decay=0.5)
    back.load_state_dict(torchs.state_dict())
    run_hybrid(second, back, range(half, STEPS))

    largest = largest_of(whole)
    for model in (theirs, second):
        for p, q in zip(whole.parameters(), model.parameters(), strict=True):
            assert off(p, q) <= bound(clip_norm, largest)
