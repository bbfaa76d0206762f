"""One script for one worker, several workers of a process, or the ranks of torchrun, beside the plain loop.

python examples/trainer_anywhere.py                                        # alone
WORKERS=2 python examples/trainer_anywhere.py                              # two workers
torchrun --nproc-per-node 2 examples/trainer_anywhere.py                   # two processes
"""

import copy
import os

import torch
from torch import nn

import pipedejavu as pdv

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)).double()
inputs = torch.randn(256, 16).double()
targets = inputs[:, :4].argmax(1)
batches = list(zip(inputs.split(48), targets.split(48), strict=True))  # the last has 16 samples


def train_plainly(model: nn.Module) -> None:
    """The loop that the Trainer replaces."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def train(model: nn.Module) -> float:
    """Trains with all workers that are there; every rank of torchrun runs this."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    launched = "RANK" in os.environ
    workers = None if launched else int(os.environ.get("WORKERS", "1"))
    trainer = pdv.Trainer(model, optimizer, nn.CrossEntropyLoss(), plan="1f1b", workers=workers)
    for _ in range(3):
        for batch in batches:
            loss = trainer.step(batch)
    return loss


plain = copy.deepcopy(model)
train_plainly(plain)
last = train(model)
trained, expected = model.state_dict(), plain.state_dict()
furthest = max((trained[name] - expected[name]).abs().max().item() for name in expected)
assert furthest < 1e-12, furthest
if os.environ.get("RANK", "0") == "0":
    print(f"last loss {last:.6f}, weights within {furthest:.0e} of the plain loop's")
