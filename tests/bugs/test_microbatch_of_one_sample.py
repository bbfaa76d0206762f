"""A model whose graph has other operations for one sample was refused when the last batch was short.

Masks of transformers, for example, are expanded over the batch only if it has several samples.
"""

import copy

import torch
from torch import Tensor, nn

from pipedejavu import Trainer


class Expanding(nn.Module):
    """Expands a mask over the batch, as models do, unless there is one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, rows: Tensor) -> Tensor:
        mask = torch.linspace(0.5, 1.5, 6, dtype=rows.dtype)[None]
        if len(rows) > 1:
            mask = mask.repeat(len(rows), 1)
        for block in self.blocks:
            rows = rows + torch.tanh(block(rows)) * mask
        return rows


def test_a_short_last_batch_trains_as_in_a_plain_loop():
    torch.manual_seed(0)
    model = Expanding().double()
    plain = copy.deepcopy(model)
    batches = [torch.randn(n, 6, dtype=torch.float64) for n in (8, 8, 6)]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for rows in batches:
        nn.functional.mse_loss(plain(rows), rows.flip(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    trainer = Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.functional.mse_loss, plan="1f1b", workers=2
    )
    for rows in batches:
        trainer.step((rows, rows.flip(1)))
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=0, atol=1e-12)
