"""Where state rests, and when updates run, changes no bit: the grid of placements and windows."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from pipedejavu.hybrid import HybridAdamW
from pipedejavu.optim.moment_format import MomentFormat

STEPS = 20
UNITS = 6
PLACES = range(UNITS + 1)
WINDOWS = (None, 1, 2, 3)
CLIPS = (None, 0.5, 1e9)
"""Off, binding in every step, never binding."""
DTYPES = (torch.bfloat16, torch.float32)
GRID = list(itertools.product(PLACES, WINDOWS, CLIPS, (True, False), DTYPES, (False, True)))
Case = tuple[int, int | None, float | None, bool, torch.dtype, bool]
NARROW: tuple[MomentFormat, ...] = ("bf16", "int8")


def name(case: Case) -> str:
    units, window, clip, speculates, dtype, checkpoints = case
    words = [f"{units} on the GPU", f"window {window}", f"clip {clip}", str(dtype).removeprefix("torch.")]
    return ", ".join([*words, *["speculative"] * speculates, *["checkpointed"] * checkpoints])


def check(lab: Any, bits: Any, compare: Any, case: Case, moments: MomentFormat = "fp32") -> None:
    units, window, clip_norm, speculates, dtype, checkpoints = case
    model = lab.net(dtype, checkpoints=checkpoints)
    optimizer = lab.hybrid(
        model, clip_norm=clip_norm, gpu_units=units, window=window, speculate=speculates, moments=moments
    )
    lab.train(model, optimizer, range(STEPS))
    compare(bits(optimizer, model), lab.plain_bits(dtype, clip_norm, STEPS, moments))
    assert optimizer.num_skipped == 0


@pytest.mark.parametrize("case", GRID[::41], ids=name)
def test_some_placements_agree_bit_for_bit(case: Case, lab: Any, bits: Any, compare: Any) -> None:
    check(lab, bits, compare, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID, ids=name)
def test_all_placements_agree_bit_for_bit(case: Case, lab: Any, bits: Any, compare: Any) -> None:
    check(lab, bits, compare, case)


@pytest.mark.parametrize("moments", NARROW)
@pytest.mark.parametrize("case", GRID[::97], ids=name)
def test_some_placements_agree_bit_for_bit_with_moments_of_fewer_bits(
    case: Case, moments: MomentFormat, lab: Any, bits: Any, compare: Any
) -> None:
    check(lab, bits, compare, case, moments)


@pytest.mark.slow
@pytest.mark.parametrize("moments", NARROW)
@pytest.mark.parametrize("case", GRID, ids=name)
def test_all_placements_agree_bit_for_bit_with_moments_of_fewer_bits(
    case: Case, moments: MomentFormat, lab: Any, bits: Any, compare: Any
) -> None:
    check(lab, bits, compare, case, moments)


def test_the_clips_are_what_they_say(lab: Any) -> None:
    for dtype in DTYPES:
        free, bound, loose = (lab.plain_bits(dtype, clip, STEPS) for clip in CLIPS)
        assert all(torch.equal(free[key], loose[key]) for key in free)
        assert not any(torch.equal(free[key], bound[key]) for key in free if key.endswith(": m"))


@pytest.mark.parametrize("window", [1, 2])
def test_blocks_whose_inputs_have_no_gradient_come_through_the_window_too(window: int) -> None:
    def train(window: int | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8), nn.Linear(8, 7))
        optimizer = HybridAdamW(model, lr=0.01, clip_norm=1.0, window=window)
        for _ in range(3):
            model(torch.arange(7)).logsumexp(-1).sum().backward()
            optimizer.step()
        found = {name: weight.clone() for name, weight in model.state_dict().items()}
        optimizer.close()
        return found

    expected = train(None)
    assert all(torch.equal(weight, expected[name]) for name, weight in train(window).items())
