"""`train` compares a user's model with its units before it starts workers."""

from pathlib import Path

import pytest

from pipedejavu.facts import InputError, Machine
from pipedejavu.launch import plan_run
from pipedejavu.plan import preset
from pipedejavu.run import TrainOptions
from tests.engine.case import machine_of

SOURCE = """
import numpy as np
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        x = self.layers[0](x) * np.random.rand()
        return self.layers[2](self.layers[1](x).tanh())

def make():
    samples = [(torch.randn(6), torch.randn(6)) for _ in range(8)]
    return Net(), lambda output, target: ((output - target) ** 2).sum(), samples
"""


def test_a_model_that_draws_with_numpy_is_refused_before_workers_start(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(SOURCE)
    plan = preset("1f1b").at(workers=2, microbatches=2)
    machine: Machine = machine_of(plan, "cpu")
    options = TrainOptions(model=f"{file}:make")
    sentence = (
        r"first in unit 'layers.0' at .*net.py:12, 'x = .* Its forward draws from numpy.random.* --no-check-model"
    )
    with pytest.raises(InputError, match=sentence):
        plan_run(options, plan, machine)
    assert plan_run(options.replace(check_model=False), plan, machine).program.pieces
