"""Every worker calls a user's function in a process of its own, and must get the same data from it."""

from pathlib import Path

import torch

from pipedejavu.source.model_source import open_task

NOISE = """
import random

import numpy as np
import torch
from torch import nn


def make():
    rows = [(torch.from_numpy(np.random.rand(4)).float(), torch.tensor([random.random()])) for _ in range(8)]
    return nn.Linear(4, 1), nn.MSELoss(), rows
"""


def test_data_that_numpy_and_python_draw_are_those_of_the_seed(tmp_path: Path) -> None:
    (tmp_path / "noise.py").write_text(NOISE)
    first, again, other = (open_task(f"{tmp_path}/noise.py:make", seed=seed).data.batch(range(8)) for seed in (3, 3, 4))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[1], other[1])
