import math

import hypothesis.strategies as st
import numpy
import pytest
import torch
from hypothesis import example, given
from torch import Tensor

from pipedejavu.optim.arithmetic import AdamState, join, scalars_of, split, update_

PATTERNS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64)
CORNERS = [0, 0x80000000, 1, 0x80000001, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x28000, 0x7F800000, 0xFF800000, 0x7F7FFFFF,
           0x7F7F8000, 0x7F7F7FFF, 0x007FFFFF, 0x3F808000, 0xBF808000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000]  # fmt: skip
"""Zeros, denormals, ties, infinities, the largest numbers, NaNs."""


def floats(patterns: list[int]) -> Tensor:
    return torch.from_numpy(numpy.array(patterns, dtype=numpy.uint32).view(numpy.float32))


@given(PATTERNS)
@example(CORNERS)
def test_the_halves_rebuild_the_master_exactly(patterns: list[int]) -> None:
    master = floats(patterns)
    high, low = split(master)
    assert high.dtype == torch.bfloat16
    assert low.dtype == torch.int16
    assert join(high, low).view(torch.int32).equal(master.view(torch.int32))


@given(PATTERNS)
@example(CORNERS)
def test_the_high_half_is_the_nearest_bf16_and_ties_go_away_from_zero(patterns: list[int]) -> None:
    master = floats(patterns)
    master = master[master.abs() < torch.finfo(torch.bfloat16).max]
    high, _ = split(master)
    bits = high.view(torch.int16).to(torch.int32)
    distance = (high.double() - master.double()).abs()
    for step in (-1, 1):
        magnitude = (bits & 0x7FFF) + step
        other = ((bits & 0x8000) | magnitude.clamp(min=0)).to(torch.int16).view(torch.bfloat16)
        beside = (other.double() - master.double()).abs()
        is_tie = (distance == beside) & (other != high)
        assert (distance <= beside).all()
        assert (high.double().abs() >= other.double().abs())[is_tie].all()


def test_infinities_and_values_past_the_largest_bf16_survive() -> None:
    master = torch.tensor([math.inf, -math.inf, torch.finfo(torch.float32).max])
    high, low = split(master)
    assert high.tolist() == [math.inf, -math.inf, math.inf]
    assert join(high, low).equal(master)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_two_updates_are_those_of_the_formula(weight_decay: float) -> None:
    """Against the textbook in float64: each of about 12 operations rounds once, so 16 ulps of the weight do."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(50, generator=generator)
    state = AdamState(weight.clone(), None, torch.zeros(50), torch.zeros(50))
    w, m, v = weight.double(), torch.zeros(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)
    for step in (1, 2):
        gradient = torch.randn(50, generator=generator)
        update_(scalars_of(step, 0.01, (0.9, 0.99), 1e-8, weight_decay, 0.5), gradient, state, state)
        x = gradient.double() * 0.5
        m, v = 0.9 * m + 0.1 * x, 0.99 * v + 0.01 * x * x
        root = (v / (1 - 0.99**step)).sqrt() + 1e-8
        w = w * (1 - 0.01 * weight_decay) - 0.01 * (m / (1 - 0.9**step)) / root
    ulp = torch.finfo(torch.float32).eps
    assert ((state.weight - w).abs() <= 16 * ulp * (w.abs() + 0.02)).all()
    assert ((state.m - m).abs() <= 16 * ulp * (m.abs() + 0.1)).all()
    assert ((state.v - v).abs() <= 16 * ulp * v).all()


def test_an_update_to_other_memory_leaves_the_old_state_as_it_was() -> None:
    high, low = split(torch.randn(9, generator=torch.Generator().manual_seed(1)))
    old = AdamState(high, low, torch.ones(9), torch.ones(9))
    before = [tensor.clone() for tensor in old if tensor is not None]
    new = AdamState(high.clone(), low.clone(), torch.zeros(9), torch.zeros(9))
    update_(scalars_of(1, 0.1, (0.9, 0.99), 1e-8, 0.0, 1.0), torch.ones(9, dtype=torch.bfloat16), old, new)
    assert all(a.equal(b) for a, b in zip(before, (t for t in old if t is not None), strict=True))
    assert not join(new.weight, new.low).equal(join(high, low))  # type: ignore[arg-type]
