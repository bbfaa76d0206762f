"""A recomputed block gives the same bits as one that keeps everything, whatever its forward does."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipedejavu.runtime.recompute import Recompute

CPU = torch.device("cpu")


class Counted(nn.Module):
    """Adds up how often it ran."""

    def __init__(self, inside: nn.Module):
        super().__init__()
        self.inside, self.runs = inside, 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.inside(x)


class Inner(nn.Module):
    """A block that recomputes a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.4))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.second, self.first(x).tanh(), use_reentrant=False).sin()


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.2)),
    "statistics": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6)),
    "frozen": lambda: nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, 6)),
    "nothing saved": lambda: nn.Sequential(nn.Identity()),
    "nested": Inner,
}


def train(kind: str, *, again: bool, cast: bool = False, needs: bool = True) -> dict[str, Any]:
    """Runs three blocks forward and backward; returns everything that this changes."""
    torch.manual_seed(0)
    blocks = [BLOCKS[kind]() for _ in range(3)]
    x = torch.randn(5, 6, requires_grad=needs)
    value = x
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        for block in blocks:
            value = Recompute(block, block.forward, CPU)(value) if again else block(value)
    if value.requires_grad:
        torch.rand(7)  # what is drawn between the passes stays as it is
        value.float().square().sum().backward()
    found = {f"{n}.{name}": p.grad for n, block in enumerate(blocks) for name, p in block.named_parameters()}
    found |= {f"{n}.{name}": b for n, block in enumerate(blocks) for name, b in block.named_buffers()}
    return {**found, "x": x.grad, "y": value.detach(), "drawn": torch.get_rng_state()}


@pytest.mark.parametrize("cast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("needs", [True, False], ids=["gradient", "samples"])
@pytest.mark.parametrize("kind", list(BLOCKS))
def test_it_changes_no_bit(kind: str, cast: bool, needs: bool) -> None:
    kept, again = (train(kind, again=again, cast=cast, needs=needs) for again in (False, True))
    assert kept.keys() == again.keys()
    for name, value in kept.items():
        assert (value is None) == (again[name] is None), name
        assert value is None or torch.equal(value, again[name]), name


def test_the_second_run_ends_with_what_is_needed() -> None:
    first, last = Counted(nn.Linear(4, 4)), Counted(nn.Identity())
    block = nn.Sequential(first, nn.Tanh(), last)
    output = Recompute(block, block.forward, CPU)(torch.randn(3, 4))
    assert (first.runs, last.runs) == (1, 1)
    output.sum().backward()
    assert (first.runs, last.runs) == (2, 1)


def test_arguments_of_every_kind_pass() -> None:
    weight = torch.randn(4, requires_grad=True)

    def forward(pair: tuple[Tensor, Tensor], *, scale: Tensor, power: int) -> dict[str, Any]:
        return {"y": ((pair[0] * weight * scale) ** power).sum(), "n": pair[1], "power": power}

    a, scale, number = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True), torch.tensor([3])
    found = Recompute(nn.Identity(), forward, CPU)((a, number), scale=scale, power=3)
    assert found["n"] is number
    assert found["power"] == 3
    expected = torch.autograd.grad(forward((a, number), scale=scale, power=3)["y"], [a, scale, weight])
    for ours, plain in zip(torch.autograd.grad(found["y"], [a, scale, weight]), expected, strict=True):
        assert torch.equal(ours, plain)


def test_a_backward_may_come_twice_and_be_differentiated() -> None:
    block, x = BLOCKS["linear"]().double(), torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    (plain,) = torch.autograd.grad(block(x).sum(), x, create_graph=True)
    output = Recompute(block, block.forward, CPU)(x).sum()
    (once,) = torch.autograd.grad(output, x, create_graph=True)
    (twice,) = torch.autograd.grad(output, x, retain_graph=True)
    assert torch.equal(once, plain)
    assert torch.equal(twice, plain)
    weights = list(block.parameters())[:3]
    for ours, own in zip(
        torch.autograd.grad(once.square().sum(), weights),
        torch.autograd.grad(plain.square().sum(), weights),
        strict=True,
    ):
        assert torch.equal(ours, own)


def test_no_memory_is_kept() -> None:
    block, x = BLOCKS["linear"](), torch.randn(5, 6)
    output = Recompute(block, block.forward, CPU)(x)
    kept = weakref.ref(x)
    gc.disable()
    try:
        del x
        assert kept() is not None
        output.sum().backward()
        assert kept() is None
    finally:
        gc.enable()


def test_an_argument_that_was_changed_is_noticed() -> None:
    block, x = BLOCKS["linear"](), torch.randn(5, 6)
    output = Recompute(block, block.forward, CPU)(x)
    x.add_(1)
    with pytest.raises(
        RuntimeError, match=r"^an argument of a block that is recomputed was changed in place after it ran; give"
    ):
        output.sum().backward()


def test_a_forward_that_is_another_the_second_time_is_noticed() -> None:
    calls: list[int] = []

    def forward(x: Tensor) -> Tensor:
        calls.append(0)
        return x.sin().sum() if len(calls) == 1 else x

    output = Recompute(nn.Identity(), forward, CPU)(torch.randn(3, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"^a block saved 1 tensors in its forward, and when it was recomputed 0,"):
        output.backward()
    assert len(calls) == 2


@pytest.mark.gpu
def test_a_gpu_draws_the_same_again() -> None:
    device = torch.device("cuda", 0)
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.2)).to(device)
        x = torch.randn(32, 64, device=device, requires_grad=True)
        (Recompute(block, block.forward, device)(x) if again else block(x)).sum().backward()
        found.append([x.grad, *(p.grad for p in block.parameters()), torch.cuda.get_rng_state(device)])
    assert all(torch.equal(kept, ours) for kept, ours in zip(*found, strict=True))
