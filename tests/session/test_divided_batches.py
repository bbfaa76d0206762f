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


class Tokens(nn.Module):
    """A causal transformer whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(8, 16), nn.Embedding(20, 16)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.RMSNorm(16), "qkv": nn.Linear(16, 48), "out": nn.Linear(16, 16)})
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for layer in self.layers:
            heads = layer["qkv"](layer["norm"](x)).view(*ids.shape, 3, 4, 4).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + layer["out"](mixed.transpose(1, 2).flatten(2))
        return nn.functional.linear(self.norm(x), self.token.weight)


def make_tokens() -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 8, (22, 8), generator=generator)
    labels = ids.roll(-1, 1)
    labels[::3, -3:] = -100
    return DataLoader(TensorDataset(ids, labels), batch_size=8, shuffle=True, generator=generator)


def tokens_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


@pytest.mark.parametrize(("plan", "workers"), [("sequence", 2), ("vocabulary", 4), ("context", 2), ("context", 4)])
def test_divided_sequences_train_as_a_plain_loop(plan: str, workers: int):
    torch.manual_seed(0)
    model = Tokens().double()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for ids, labels in make_tokens():
        tokens_loss(plain(ids), labels).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loss=tokens_loss,
        plan=plan,
        workers=workers,
        clip_norm=0.5,
    )
    for batch in make_tokens():
        trainer.step(batch)
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=0, atol=1e-12)
