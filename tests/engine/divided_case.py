"""Tiny models whose operators can be divided by 2 and 4, and plans that divide them."""

from typing import Any

import torch
from torch import Tensor, nn

from pipedejavu.engine import AdamW, Sgd
from pipedejavu.plan import Plan
from pipedejavu.plan.axis import Cut, Feed, Keep, Layout, Order, Place, Reduce
from pipedejavu.zoo.transformer import TransformerBlock, TransformerSize
from tests.engine.case import Case, Samples, Units, gpt_samples


class Tokens(nn.Module):
    """Token and position embeddings, with dropout."""

    def __init__(self, dropout: float, context: int, vocabulary: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, 8), nn.Parameter(torch.randn(context, 8))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.token(x) + self.position)


class TiedLogits(nn.Module):
    """Scores tokens with the embedding's own weights."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(8), weight

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) @ self.weight.T


def heads(count: int, dropout: float = 0.2, context: int = 3, vocabulary: int = 7) -> Units:
    """A GPT with four heads, dropout inside and outside of what is divided, and a tied embedding."""
    tokens = Tokens(dropout, context, vocabulary)
    size = TransformerSize(layers=count, width=8, context=context, vocabulary=vocabulary, heads=4, dropout=dropout)
    blocks: Units = [(f"u{n}", TransformerBlock(size, is_causal=True)) for n in range(1, count - 1)]
    return [("u0", tokens), *blocks, (f"u{count - 1}", TiedLogits(tokens.token.weight))]


def wide_mlp(count: int) -> Units:
    units: Units = [
        (f"u{n}", nn.Sequential(nn.Linear(8 if n else 5, 8), nn.ReLU(inplace=True))) for n in range(count - 1)
    ]
    return [*units, (f"u{count - 1}", nn.Linear(8, 3))]


def wide_mlp_samples(sizes: list[int], random: torch.Generator) -> Samples:
    x = [torch.randn(n, 5, generator=random) for n in sizes]
    return Samples(x, [torch.randint(0, 3, (n,), generator=random) for n in sizes], sizes)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean((2, 3)))


def filters(count: int) -> Units:
    """Convolutions with BatchNorm and pooling."""
    units: Units = []
    for n in range(count - 1):
        conv = nn.Conv2d(8 if n else 1, 8, 3, padding=1, bias=n % 2 == 1)
        units.append((f"u{n}", nn.Sequential(conv, nn.Tanh() if n % 2 else nn.BatchNorm2d(8), nn.MaxPool2d(1))))
    return [*units, (f"u{count - 1}", Pooled())]


def filter_samples(sizes: list[int], random: torch.Generator) -> Samples:
    x = [torch.randn(n, 1, 4, 4, generator=random) for n in sizes]
    return Samples(x, [torch.randint(0, 3, (n,), generator=random) for n in sizes], sizes)


def long_heads(count: int) -> Units:
    return heads(count, context=8, vocabulary=12)


def long_samples(sizes: list[int], random: torch.Generator) -> Samples:
    """Sequences of eight tokens; some targets do not count."""
    x = [torch.randint(0, 12, (n, 8), generator=random) for n in sizes]
    y = [torch.randint(0, 12, (n, 8), generator=random) for n in sizes]
    for target in y:
        target[0, 2:5] = -100
    return Samples(x, y, [int((target != -100).sum()) for target in y])


MODELS = {"heads": (heads, gpt_samples), "wide-mlp": (wide_mlp, wide_mlp_samples), "filters": (filters, filter_samples)}
MODELS |= {"tokens": (long_heads, long_samples)}


def divided_case(
    model: str,
    *,
    shards: int = 2,
    workers: int = 1,
    replicas: int = 1,
    units: int = 5,
    clip_norm: float | None = None,
    optimizer: AdamW | Sgd | None = None,
    rounds: int = 2,
    layout: str = "",
    layouts: tuple[Layout, ...] = (),
    keep: Keep | None = None,
    **order: Any,
) -> Case:
    """Returns a case of tensor × pipeline × data parallelism with microbatches of four samples."""
    keep = keep or Keep()
    wire = "reduce-scatter" if keep.kind.startswith("zero") else "all-reduce" if replicas > 1 else "none"
    plan = Plan(
        name="divided",
        cut=Cut(kind="layout", layouts=(layout,))
        if layout
        else Cut(kind="chain", layouts=layouts)
        if workers > 1 or layouts
        else Cut(),
        place=Place(workers=workers, replicas=replicas, shards=shards)
        if layout
        else Place(workers=workers, replicas=replicas, stage_shards=(shards,) * workers if shards > 1 else None),
        order=Order(kind="1f1b" if workers > 1 else "step", **order),
        feed=Feed(microbatches=3, samples=4),
        reduce=Reduce(wire=wire, clip="global" if clip_norm else "none"),
        keep=keep,
    )
    build, make_samples = MODELS[model]
    # Momentum, unlike AdamW, keeps differences as small as the sums that made them.
    return Case(plan, build(units), make_samples, optimizer or Sgd(lr=0.1, momentum=0.9), clip_norm, (4,), rounds)
