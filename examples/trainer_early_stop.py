"""Evaluation after each epoch, and an early stop by a callback."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pipedejavu as pdv

EPOCHS = 30


class EarlyStop(pdv.Callback):
    """Stops training when the evaluation's loss has not improved."""

    best = float("inf")

    def on_evaluate(self, trainer: pdv.Trainer, metrics: dict[str, float]) -> None:
        """Compares the loss with the best one so far."""
        trainer.should_stop = metrics["loss"] > self.best
        self.best = min(self.best, metrics["loss"])


def train_plainly(model: nn.Module, loader: DataLoader, held_out: TensorDataset) -> int:
    """The loop that `fit` replaces; returns how many epochs it made."""
    optimizer, best = torch.optim.AdamW(model.parameters(), lr=2e-2), float("inf")
    for epoch in range(EPOCHS):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(held_out.tensors[0]), held_out.tensors[1]).item()
        if loss > best:
            return epoch + 1
        best = loss
    return EPOCHS


torch.manual_seed(0)
inputs = torch.randn(160, 8).double()
targets = (inputs.sum(1) + torch.randn(160) > 0).long()  # half of it is noise, which the model soon learns by heart
train_data, held_out = TensorDataset(inputs[:100], targets[:100]), TensorDataset(inputs[100:], targets[100:])
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)).double()
plain = copy.deepcopy(model)
epochs = train_plainly(plain, DataLoader(train_data, batch_size=32), held_out)

trainer = pdv.Trainer(model, torch.optim.AdamW(model.parameters(), lr=2e-2), nn.CrossEntropyLoss(), workers=2)
history = trainer.fit(DataLoader(train_data, 32), DataLoader(held_out, 25), epochs=EPOCHS, callbacks=[EarlyStop()])
assert len(history.epochs) == epochs < EPOCHS
furthest = max((model.state_dict()[name] - tensor).abs().max().item() for name, tensor in plain.state_dict().items())
assert furthest < 1e-12, furthest
for record in history.epochs:
    print(f"epoch {record.epoch}: loss {record.loss:.4f}, held out", record.metrics)
