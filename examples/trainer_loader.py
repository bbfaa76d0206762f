"""A DataLoader with shuffling, worker processes and a short last batch, and a learning-rate schedule."""

import copy

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import pipedejavu as pdv

EPOCHS = 3


def make_model() -> nn.Module:
    """Returns the same model each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)).double()


def make_loader(data: TensorDataset) -> DataLoader:
    """Returns a loader whose order depends on its own generator; the last batch has 8 samples."""
    order = torch.Generator().manual_seed(1)
    return DataLoader(data, batch_size=32, shuffle=True, num_workers=2, generator=order)


def train_plainly(model: nn.Module, loader: DataLoader) -> None:
    """The loop that the Trainer replaces."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=EPOCHS * len(loader))
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            scheduler.step()


def train(model: nn.Module, loader: DataLoader) -> float:
    """The same training on two workers; each step makes the scheduler's step too."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=EPOCHS * len(loader))
    trainer = pdv.Trainer(model, optimizer, nn.CrossEntropyLoss(), scheduler=scheduler, plan="1f1b", workers=2)
    for _ in range(EPOCHS):
        for batch in loader:
            loss = trainer.step(batch)
    return loss


if __name__ == "__main__":
    inputs = torch.randn(200, 16, generator=torch.Generator().manual_seed(2)).double()
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    model, plain = make_model(), copy.deepcopy(make_model())
    train_plainly(plain, make_loader(data))
    last = train(model, make_loader(data))
    furthest = max(
        (model.state_dict()[name] - tensor).abs().max().item() for name, tensor in plain.state_dict().items()
    )
    assert furthest < 1e-12, furthest
    print(f"last loss {last:.4f}, weights within {furthest:.0e} of the plain loop's")
