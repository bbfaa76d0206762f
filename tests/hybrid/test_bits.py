"""Where state rests, and when updates run, changes no bit: the grid of placements and windows."""

import itertools
from typing import Any

import pytest
import torch

STEPS = 20
UNITS = 6
PLACES = range(UNITS + 1)
WINDOWS = (None, 1, 2, 3)
CLIPS = (None, 0.5, 1e9)
"""Off, binding in every step, never binding."""
DTYPES = (torch.bfloat16, torch.float32)
GRID = list(itertools.product(PLACES, WINDOWS, CLIPS, (True, False), DTYPES, (False, True)))
Case = tuple[int, int | None, float | None, bool, torch.dtype, bool]


def name(case: Case) -> str:
    units, window, clip, guesses, dtype, checkpoints = case
    words = [f"{units} on the GPU", f"window {window}", f"clip {clip}", str(dtype).removeprefix("torch.")]
    return ", ".join([*words, *["guesses"] * guesses, *["checkpointed"] * checkpoints])


def check(lab: Any, bits: Any, compare: Any, case: Case) -> None:
    units, window, clip_norm, guesses, dtype, checkpoints = case
    model = lab.net(dtype, checkpoints=checkpoints)
    optimizer = lab.hybrid(model, clip_norm=clip_norm, gpu_units=units, window=window, speculate=guesses)
    lab.train(model, optimizer, range(STEPS))
    compare(bits(optimizer, model), lab.plain_bits(dtype, clip_norm, STEPS))
    assert optimizer.num_skipped == 0


@pytest.mark.parametrize("case", GRID[::41], ids=name)
def test_some_placements_agree_bit_for_bit(case: Case, lab: Any, bits: Any, compare: Any) -> None:
    check(lab, bits, compare, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID, ids=name)
def test_all_placements_agree_bit_for_bit(case: Case, lab: Any, bits: Any, compare: Any) -> None:
    check(lab, bits, compare, case)


def test_the_clips_are_what_they_say(lab: Any) -> None:
    for dtype in DTYPES:
        free, bound, loose = (lab.plain_bits(dtype, clip, STEPS) for clip in CLIPS)
        assert all(torch.equal(free[key], loose[key]) for key in free)
        assert not any(torch.equal(free[key], bound[key]) for key in free if key.endswith(": m"))
