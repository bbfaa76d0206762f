"""The end of a process that has lanes: what ends it is what is told, not an abort."""

import subprocess
import sys

PROGRAM = """
import torch
from torch import nn
import pipedejavu as pdv

model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)])
optimizer = pdv.HybridAdamW(model, lr=1e-3, clip_norm=1.0, gpu_units=0)
for _ in range(3):
    model(torch.randn(4, 1024)).square().mean().backward()
    optimizer.step()
{ending}
"""


def end(ending: str) -> tuple[int, str]:
    """Runs a loop that ends so while its lanes are at work; returns its exit code and the last line that it wrote."""
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(ending=ending)], capture_output=True, text=True)
    return done.returncode, (done.stderr.splitlines() or [""])[-1]


def test_a_fault_in_the_users_loop_is_the_last_thing_said():
    assert end("raise ValueError('the data is gone')") == (1, "ValueError: the data is gone")


def test_a_loop_that_ends_ends_well():
    code, said = end("")
    assert code == 0, said
