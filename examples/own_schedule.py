"""A schedule of one's own in ten lines: predicted, proved legal, and trained with, beside GPipe and 1F1B."""

import torch
from torch import nn

from pipedejavu import Trainer
from pipedejavu.analysis import verify
from pipedejavu.engine import Sgd
from pipedejavu.plan import preset
from pipedejavu.program import compile
from pipedejavu.simulate import simulate, unit_costs

WORKERS, MICROBATCHES = 2, 8


def in_waves(size: int) -> str:
    """Runs forwards in waves of `size`, then their backwards: GPipe's order with the memory of one wave."""
    slots = []
    for first in range(0, MICROBATCHES, size):
        wave = range(first, min(first + size, MICROBATCHES))
        slots += [f"F{k}" for k in wave] + [f"B{k}" for k in wave]
    return " ".join(slots)


rows = (in_waves(4),) * WORKERS  # one row for each worker
base = preset("gpipe").at(workers=WORKERS, microbatches=MICROBATCHES)
waves = base.replace(name="waves", order=base.order.replace(kind="written", rows=rows))

for plan in (base, waves, preset("1f1b").at(workers=WORKERS, microbatches=MICROBATCHES)):
    program = compile(*unit_costs(plan, {}))
    found = simulate(program, verify(program))
    live = max(worker.peak_live_microbatches for worker in found.workers)
    print(f"{plan.name:<6} makespan {found.makespan_s:g}, bubble {found.bubble_fraction:.1%}, {live} microbatches live")

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)), nn.Linear(16, 1))
inputs = torch.randn(64, 16)
batch = (inputs, inputs.sum(1, keepdim=True))
trainer = Trainer(model, lambda out, y: ((out - y) ** 2).sum(), sample=batch, plan=waves, optimizer=Sgd(lr=0.02))
for step in range(5):
    print(f"step {step}: loss {trainer.step(batch):.4f}")
