"""Weights that stages share, under orders that split the backward: plain training in float64, and the audit agree."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from pipedejavu.engine import AdamW
from pipedejavu.session import Trainer

WIDTH, WORDS, LENGTH = 6, 11, 5
ORDERS = {"zb-h1": 4, "zb-v": 2, "dualpipe-v": 2}


class Tied(nn.Module):
    """A language model whose embedding is its head, with a further layer that two places share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        shared = nn.Linear(WIDTH, WIDTH)
        others = [nn.Linear(WIDTH, WIDTH) for _ in range(5)]
        self.layers = nn.ModuleList([shared, *others, shared])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in self.layers])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x)).tanh()
        return self.head(x)


def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="mean")


def batch(seed: int):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(WORDS, (8, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize(("order", "workers"), ORDERS.items())
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_tied_weights_train_as_in_a_plain_loop(order: str, workers: int, clip_norm: float | None) -> None:
    plain = Tied().double()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1)
    losses = []
    for seed in range(3):
        optimizer.zero_grad()
        inputs, targets = batch(seed)
        mean = loss(plain(inputs), targets)
        mean.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), clip_norm)
        optimizer.step()
        losses.append(mean.item())
    trainer = Trainer(
        Tied().double(),
        AdamW(lr=0.01, weight_decay=0.1),
        loss,
        sample=batch(0),
        plan=order,
        workers=workers,
        clip_norm=clip_norm,
    )
    assert trainer.program.plan.splits_backward
    assert trainer.program.tied_pieces
    assert [trainer.step(batch(seed)) for seed in range(3)] == pytest.approx(losses, rel=1e-12)
    trained = trainer.save_to_model()
    assert trained.head.weight is trained.embedding.weight
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], weight, rtol=1e-12, atol=1e-12, msg=name)
