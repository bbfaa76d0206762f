"""Models of many styles, written as users write them, and the comparison of a cut model with the whole one."""

import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.recompute_span import backward, with_loss
from pipedejavu.profile import ModelCut, cut_model
from pipedejavu.profile.model_trace import as_call


@dataclass(frozen=True)
class Difference:
    """What is not the same bit for bit, with the model cut into some number of pieces."""

    pieces: int
    outputs: list[int]
    loss: float
    gradients: list[str]
    buffers: list[str]

    @property
    def is_none(self) -> bool:
        return not (self.outputs or self.loss or self.gradients or self.buffers)


def own_loss(output: Any) -> Tensor:
    """Returns a model's own loss, or else the sum of the squares of all that it returns."""
    if isinstance(getattr(output, "loss", None), Tensor):
        return output.loss
    leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    return torch.stack([leaf.float().square().sum() for leaf in leaves]).sum()


def compare(model: nn.Module, inputs: Any, loss=own_loss) -> tuple[ModelCut, list[Difference]]:
    """Cuts a model, and compares it with the whole one for every number of pieces."""
    cut = cut_model(model, inputs)
    whole = copy.deepcopy(model)
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, as_call(inputs))
    output = whole(*args, **kwargs)
    expected = loss(output)
    expected.backward()
    found = []
    for pieces in range(1, len(cut.units) + 1):
        result, ended, gradients, buffers = run(cut, inputs, loss, pieces)
        leaves, others = pytree.tree_leaves(output), pytree.tree_leaves(result)
        assert len(leaves) == len(others)
        found.append(
            Difference(
                pieces,
                [n for n, (a, b) in enumerate(zip(leaves, others, strict=True)) if not same(a, b)],
                (expected - ended).abs().item(),
                [n for n, p in whole.named_parameters() if not same(_grad(p), gradients.get(n, torch.zeros_like(p)))],
                [n for n, b in whole.named_buffers() if n in buffers and not same(b, buffers[n])],
            )
        )
    return cut, found


def run(cut: ModelCut, inputs: Any, loss, pieces: int, seed: int = 0):
    """Runs copies of the units as pieces of about the same length; returns output, loss, gradients and buffers."""
    units = copy.deepcopy(list(cut.units))
    edges = [round(n * len(units) / pieces) for n in range(pieces + 1)]
    spans = [range(a, b) for a, b in pairwise(edges)]
    runners = [PieceRunner([(n, *units[n]) for n in span], seed) for span in spans]
    value, saved = cut.flat(inputs), []
    for number, runner in enumerate(runners):
        weights = {name: w.clone().requires_grad_() for name, w in runner.initial.items()}
        value, kept = runner.forward(weights, value, 0, is_first=number == 0)
        saved.append(kept)
    ended = loss(cut.output(value))
    saved[-1] = with_loss(saved[-1], ended)
    passed: tuple[Tensor, ...] = (torch.ones_like(ended),)
    gradients: dict[str, Tensor] = {}
    for kept in reversed(saved):
        passed, own = backward(kept, passed)
        for name, gradient in own.items():
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    buffers = {name: buffer for unit, module in units for name, buffer in module.named_buffers(unit)}
    return cut.output(value), ended, gradients, buffers


def _grad(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def same(one: Any, other: Any) -> bool:
    """Whether two leaves have the same bits; a NaN is like a NaN."""
    if not isinstance(one, Tensor):
        return one == other
    return (
        one.dtype == other.dtype and torch.equal(one.isnan(), other.isnan()) and torch.equal(*map(_plain, (one, other)))
    )


def _plain(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num() if tensor.is_floating_point() else tensor


class Bottleneck(nn.Module):
    """A block of ResNet-50, with everything in place that can be."""

    def __init__(self, channels: int, width: int, stride: int = 1):
        super().__init__()
        out = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Resnet(nn.Module):
    """Shaped like ResNet-50, with fewer and smaller blocks."""

    def __init__(self, blocks: tuple[int, ...] = (2, 2, 2), width: int = 4):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.relu, self.pool, channels = nn.ReLU(inplace=True), nn.MaxPool2d(2), 8
        for n, count in enumerate(blocks):
            made = []
            for m in range(count):
                made.append(Bottleneck(channels, width << n, 2 if n and not m else 1))
                channels = 4 * (width << n)
            setattr(self, f"layer{n + 1}", nn.Sequential(*made))
        self.fc = nn.Linear(channels, 10)

    def forward(self, x):
        x = self.pool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(functional.adaptive_avg_pool2d(x, 1), 1))


class Unet(nn.Module):
    """Skips that reach over everything between them."""

    def __init__(self):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.middle = nn.Conv2d(16, 32, 3, padding=1)
        self.up2, self.up1 = nn.Conv2d(48, 16, 3, padding=1), nn.Conv2d(24, 8, 3, padding=1)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        one = functional.relu(self.down1(x))
        two = functional.relu(self.down2(functional.max_pool2d(one, 2)))
        middle = functional.relu(self.middle(functional.max_pool2d(two, 2)))
        two = functional.relu(self.up2(torch.cat([functional.interpolate(middle, scale_factor=2), two], 1)))
        one = functional.relu(self.up1(torch.cat([functional.interpolate(two, scale_factor=2), one], 1)))
        return self.out(one)


class Mixing(nn.Module):
    def __init__(self, tokens: int, width: int):
        super().__init__()
        self.norm1, self.tokens = nn.LayerNorm(width), nn.Linear(tokens, tokens)
        self.norm2, self.channels = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x)).relu_()


class Mixer(nn.Module):
    """An MLP-Mixer with keyword arguments and a nested output that holds more than tensors."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Mixing(6, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x, *, scale=1.0, mask=None):
        for block in self.blocks:
            x = block(x if mask is None else x * mask)
        return {"logits": self.head(x.mean(1) * scale), "scale": scale, "nothing": None, "pair": (x, x.detach())}


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(20, 8), nn.LSTM(8, 8, 2, batch_first=True)
        self.head = nn.Linear(8, 20)

    def forward(self, tokens):
        return self.head(self.lstm(self.embedding(tokens))[0])


class Cell(nn.Module):
    """A recurrent cell that is called for every token."""

    def __init__(self):
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(20, 8), nn.GRUCell(8, 8), nn.Linear(8, 20)

    def forward(self, tokens):
        hidden = torch.zeros(len(tokens), 8, device=tokens.device)
        for token in self.embedding(tokens).unbind(1):
            hidden = self.cell(token, hidden)
        return self.head(hidden)


class Translator(nn.Module):
    """nn.Transformer, with an embedding that encoder and decoder share."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, dropout=dropout, batch_first=True)
        self.head = nn.Linear(8, 20)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        x, y = self.embedding(source), self.embedding(target)
        return self.head(self.transformer(x, y, tgt_mask=mask, tgt_is_causal=True))


class Dense(nn.Module):
    """Every layer reads all before it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4 + 4 * n, 4, 3, padding=1) for n in range(4))
        self.head = nn.Linear(20, 3)

    def forward(self, x):
        for layer in self.layers:
            x = torch.cat([x, functional.relu(layer(x))], 1)
        return self.head(x.mean((2, 3)))


class Counting(nn.Module):
    """Buffers that change in both ways, a frozen parameter, one that is not used, and inputs that are overwritten."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.scale = nn.Parameter(torch.full((4,), 0.5), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        x.mul_(2)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        for layer in self.layers:
            x = x + layer(x - self.mean).tanh() * self.scale
        self.count += 1
        return x


class Tied(nn.Module):
    """A small language model whose embedding is its head."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(20, 8), nn.Dropout(dropout)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True) for _ in range(3))
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.dropout(self.embedding(tokens))
        mask = torch.full((tokens.shape[1],) * 2, -torch.inf, device=x.device, dtype=x.dtype).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def tokens(samples: int = 2, length: int = 5) -> Tensor:
    return torch.randint(20, (samples, length))


PLAIN = {
    "ResNet, bottlenecks in place": lambda: (Resnet(), torch.randn(4, 3, 16, 16)),
    "U-Net": lambda: (Unet(), torch.randn(2, 3, 16, 16)),
    "MLP-Mixer": lambda: (Mixer(), {"x": torch.randn(2, 6, 8), "scale": 2.0, "mask": None}),
    "LSTM": lambda: (Lstm(), tokens()),
    "nn.Transformer": lambda: (Translator(), (tokens(), tokens())),
    "dense convolutions": lambda: (Dense(), torch.randn(2, 4, 8, 8)),
    "buffers that change": lambda: (Counting(), torch.randn(3, 4)),
    "tied language model": lambda: (Tied(), tokens()),
    "recurrent cell": lambda: (Cell(), tokens()),
}
"""Models with inputs, by style."""
