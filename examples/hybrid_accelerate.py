"""HybridAdamW in a loop of Hugging Face Accelerate, with gradient accumulation."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pipedejavu import HybridAdamW

torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
model.to(accelerator.device)  # before the optimizer is made

optimizer = HybridAdamW(
    model, lr=3e-3, clip_norm=1.0, gpu_units=1, microbatches=2
)  # in place of accelerator.clip_grad_norm_
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=60)
inputs = torch.randn(2048, 16)
batches = DataLoader(TensorDataset(inputs, inputs.square().sum(1, keepdim=True) / 16), batch_size=32, shuffle=True)
hybrid = optimizer
model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)

for epoch in range(2):
    total = 0.0
    for x, target in batches:
        with accelerator.accumulate(model):
            loss = (model(x) - target).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        total += loss.item()
    print(f"epoch {epoch}: loss {total / len(batches):.4f}")

assert hybrid.plan is not None
print(*hybrid.plan.reasons, sep="\n")
hybrid.close()
