"""A loop of one's own: the same steps as plain PyTorch, by three plans on two CPU workers."""

import copy

import torch
from torch import Tensor, nn

from pipedejavu import Trainer
from pipedejavu.engine import Sgd

torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(5)]
model = nn.Sequential(*blocks, nn.Linear(16, 2))
inputs = torch.randn(64, 16)
targets = (inputs.sum(1) > 0).long()


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Sums over the samples; a step divides once by their number."""
    return nn.functional.cross_entropy(output, target, reduction="sum")


plain = copy.deepcopy(model)
optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
for _ in range(20):
    optimizer.zero_grad()
    mean = loss(plain(inputs), targets) / len(targets)
    mean.backward()
    optimizer.step()
print(f"{'plain loop':<12} last loss {mean.item():.6f}")

for plan in ("1f1b", "ddp", "zb-h1"):
    trainer = Trainer(copy.deepcopy(model), loss, sample=(inputs, targets), plan=plan, optimizer=Sgd(lr=0.5))
    for _ in range(20):
        last = trainer.step((inputs, targets))
    print(f"{plan:<12} last loss {last:.6f}, bubble predicted {trainer.predict().bubble_fraction:.1%}")
