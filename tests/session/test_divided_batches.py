"""Divided operators take batches as a DataLoader gives them: shuffled, with ignored labels and a short last batch."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pipedejavu import Trainer


def make_loader() -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(44, 12, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 7, (44,), generator=generator)
    labels[::9] = -100
    return DataLoader(TensorDataset(rows, labels), batch_size=16, shuffle=True, generator=generator)


@pytest.mark.parametrize("workers", [2, 4])
def test_divided_operators_train_as_a_plain_loop(workers: int):
    torch.manual_seed(0)
    layers = [nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 16), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(16, 7)).double()
    plain, loss = copy.deepcopy(model), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for rows, labels in make_loader():
        loss(plain(rows), labels).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    trainer = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        loss=loss,
        plan="megatron",
        workers=workers,
        clip_norm=0.5,
    )
    for batch in make_loader():
        trainer.step(batch)
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=0, atol=1e-12)
