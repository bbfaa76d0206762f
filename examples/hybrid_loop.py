"""A plain loop with HybridAdamW: state in GPU and host memory together, one line changed. Runs on a CPU too."""

import torch
from torch import Tensor, nn

from pipedejavu import HybridAdamW

device = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), *(Block(64) for _ in range(4)), nn.Linear(64, 1)).to(device, torch.bfloat16)

# before: optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3), and clip_grad_norm_ in the loop
optimizer = HybridAdamW(model, lr=1e-3, clip_norm=1.0, gpu_units=2)  # without gpu_units, as many as the GPU holds
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)

for step in range(60):
    x = torch.randn(256, 16, device=device, dtype=torch.bfloat16)
    loss = (model(x).float() - x.float().square().sum(1, keepdim=True) / 16).square().mean()
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.4f}, norm {optimizer.norm:.3f}")

assert optimizer.plan is not None
for reason in optimizer.plan.reasons:
    print(reason)
optimizer.close()
