"""Batches of two shapes through a recorded model whose forward changes its buffers: each shape has a graph of its own.

Each graph had copies of the buffers, so that running statistics after a shorter batch were those of one shape alone.
"""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from pipedejavu import Trainer
from pipedejavu.profile import cut_model

SIZES = (12, 12, 8)
"""Samples per batch; in four microbatches they are three or two."""


class Recorded(nn.Module):
    """Layers in a module of its own, which is therefore recorded as a graph."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Average(nn.Module):
    """Subtracts a moving average, which begins at 0, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return (x - self.average) / (1 + 0.1 * self.calls)


LAYERS = {
    "average": lambda: (nn.Linear(6, 8), Average(), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)),
    "batch-norm": lambda: (nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)),
    "spectral-norm": lambda: (nn.Linear(6, 8), nn.Tanh(), spectral_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 3)),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Recorded(*LAYERS[name]()).double()


def batches():
    draws = torch.Generator().manual_seed(1)
    for size in SIZES * 2:
        x = torch.randn(size, 6, generator=draws, dtype=torch.float64)
        yield x, (x.sum(1) > 0).long()


def train_plainly(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches():
        optimizer.zero_grad()
        for part_x, part_y in zip(x.chunk(4), y.chunk(4), strict=True):
            (nn.functional.cross_entropy(model(part_x), part_y) * len(part_x) / len(x)).backward()
        optimizer.step()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("workers", [1, 2])
def test_buffers_after_batches_of_two_sizes_are_those_of_a_plain_loop(name, workers) -> None:
    plain, model = make(name), make(name)
    train_plainly(plain)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), nn.CrossEntropyLoss(),
                      plan="1f1b", workers=workers)  # fmt: skip
    for batch in batches():
        trainer.step(batch)
    for (key, own), expected in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.allclose(own, expected, rtol=1e-9, atol=1e-11), key  # statistics of two samples round more


def test_graphs_for_two_shapes_share_buffers_after_a_copy_and_a_conversion() -> None:
    model = Recorded(*LAYERS["average"]())
    plain, data = copy.deepcopy(model).double(), [torch.randn(size, 6) for size in (4, 2, 4)]
    cut = cut_model(copy.deepcopy(model), data[0])
    cut.fit(data[1])
    units = [copy.deepcopy(unit).double() for _, unit in cut.units]
    for x in data:
        value = x.double()
        for unit in units:
            value = unit(value)
        assert torch.allclose(value, plain(x.double()), rtol=0, atol=1e-14)
