"""A model of one's own, with skips and a tied head: `pipedejavu train examples/own_model.py:make`, or its own loop."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipedejavu import Trainer

VOCABULARY, LENGTH = 32, 16


class Reverser(nn.Module):
    """Says a sequence backwards: nothing here knows that it will be cut."""

    def __init__(self, width: int = 64, layers: int = 4):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = nn.init.normal_(self.token.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits."""
        start = hidden = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden + start)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Sums over samples the mean over their tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / LENGTH


def make() -> tuple[nn.Module, object, TensorDataset]:
    """Returns what `train` asks of a file: the model, the loss, and a dataset of (inputs, targets)."""
    tokens = torch.randint(VOCABULARY, (1024, LENGTH))
    return Reverser(), loss, TensorDataset(tokens, tokens.flip(1))


if __name__ == "__main__":
    model, _, samples = make()
    trainer = Trainer(model, loss, sample=samples[:32], plan="1f1b", workers=2)
    print(f"units: {', '.join(name for name, _ in trainer.units)}")
    for step in range(5):
        print(f"step {step}: loss {trainer.step(samples[32 * step : 32 * step + 32]):.4f}")
