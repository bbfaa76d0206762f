"""Graph networks on sampled neighbourhoods: GraphSAGE, GCN and GAT, each layer a unit.

The first unit takes one row per node of the outermost block, and the blocks that the later layers need:

    GraphSAGE   mean of the neighbours' features, own features, indptr, indices, indptr, indices, …
    GCN         weighted sum of the neighbours' and the own features, indptr, indices, weights, …
    GAT         features, indptr, indices, …, indptr, indices

The first aggregation of GraphSAGE and GCN reads no weights of the model, so the data can do it in host memory, and a
device receives one row in place of a fan-out of rows. With `aggregates_on_host` off, the first unit takes what that of
a GAT takes, with weights for a GCN. Each further layer takes its block from the front of the tuple
and passes the rest on. `indices` are rows of the layer's input, whose first rows are the targets.
"""

import math
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from pipedejavu.facts import InputError, Record
from pipedejavu.zoo.chain import Chain, Flow
from pipedejavu.zoo.form import Aggregation, Count, GraphForm


class GraphNetSize(Record):
    """Size of a graph network."""

    kind: Literal["sage", "gcn", "gat"] = "sage"
    fanouts: tuple[int, ...] = Field(default=(10, 5), min_length=1, max_length=8)
    """Neighbours that are sampled per node, the first for the targets; one layer for each. -1 takes all."""
    features: Count | None = None
    """Features of a node; by default those of the data."""
    classes: Count | None = None
    """Classes; by default those of the data."""
    hidden: Count = 256
    aggregates_on_host: bool = True
    """Whether the data does the first aggregation of GraphSAGE and GCN in host memory."""
    heads: Count = 1
    """Attention heads of the layers of a GAT before the last."""

    def form(self) -> GraphForm:
        """Returns the form of its samples."""
        aggregation: dict[str, Aggregation] = {"sage": "mean", "gcn": "symmetric", "gat": "none"}
        return GraphForm(
            fanouts=self.fanouts,
            aggregation=aggregation[self.kind],
            aggregates_on_host=self.aggregates_on_host and self.kind != "gat",
            features=self.features,
            classes=self.classes,
        )

    def disagreements(self) -> list[str]:
        """Returns the faults of fan-outs and heads."""
        faults = [
            f"fanouts has {fanout}; give at least 1 neighbour for each layer, or -1 for all"
            for fanout in self.fanouts
            if fanout == 0 or fanout < -1
        ]
        if self.hidden % self.heads:
            faults.append(f"hidden is {self.hidden} and heads {self.heads}; choose heads that divide it")
        return faults

    @model_validator(mode="after")
    def _agree(self) -> Self:
        return self.agreed()


def mean_of_neighbours(x: Tensor, indptr: Tensor, indices: Tensor) -> Tensor:
    """Returns the mean of each row's neighbours, zeros for a row without any."""
    return functional.embedding_bag(indices, x, indptr, mode="mean", include_last_offset=True)


class SageLayer(nn.Module):
    """GraphSAGE: a linear map of the neighbours' mean plus one of the node itself, with ReLU unless it is the last."""

    def __init__(self, width_in: int, width_out: int, *, is_first: bool, is_last: bool):
        super().__init__()
        self.neighbours = nn.Linear(width_in, width_out)
        self.own = nn.Linear(width_in, width_out, bias=False)
        self.is_first, self.is_last = is_first, is_last

    def forward(self, flow: Flow) -> Flow:
        """Takes the first rows of the flow as the mean if it is the first layer, else computes it."""
        if self.is_first:
            mean, own, *rest = flow
        else:
            x, indptr, indices, *rest = flow
            mean, own = mean_of_neighbours(x, indptr, indices), x[: len(indptr) - 1]
        hidden = self.neighbours(mean) + self.own(own)
        return hidden if self.is_last else (functional.relu(hidden), *rest)


class GcnLayer(nn.Module):
    """A graph convolution: a linear map of the sum of the node and its neighbours, normalised symmetrically."""

    def __init__(self, width_in: int, width_out: int, *, is_first: bool, is_last: bool):
        super().__init__()
        self.linear = nn.Linear(width_in, width_out)
        self.is_first, self.is_last = is_first, is_last

    def forward(self, flow: Flow) -> Flow:
        """Takes the first rows of the flow as the sum if it is the first layer, else computes it."""
        if self.is_first:
            total, *rest = (flow,) if isinstance(flow, Tensor) else flow
        else:
            x, indptr, indices, weights, *rest = flow
            total = functional.embedding_bag(
                indices, x, indptr, mode="sum", per_sample_weights=weights.to(x.dtype), include_last_offset=True
            )
        hidden = self.linear(total)
        return hidden if self.is_last else (functional.relu(hidden), *rest)


class GatLayer(nn.Module):
    """Graph attention: a softmax over each node's neighbours and itself weighs their linear maps; ELU unless last."""

    def __init__(self, width_in: int, width_out: int, heads: int, *, is_last: bool):
        super().__init__()
        self.linear = nn.Linear(width_in, width_out, bias=False)
        self.source = nn.Parameter(torch.empty(heads, width_out // heads))
        self.target = nn.Parameter(torch.empty(heads, width_out // heads))
        self.bias = nn.Parameter(torch.empty(width_out))
        self.heads, self.is_last = heads, is_last

    def forward(self, flow: Flow) -> Flow:
        """Takes rows of nodes, and the layer's block."""
        x, indptr, indices, *rest = flow
        count = len(indptr) - 1
        rows = torch.arange(count, device=x.device)
        targets = torch.cat([torch.repeat_interleave(rows, indptr.diff(), output_size=len(indices)), rows])
        sources = torch.cat([indices, rows])
        hidden = self.linear(x).unflatten(1, (self.heads, -1))
        scores = (hidden * self.source).sum(-1)[sources] + (hidden[:count] * self.target).sum(-1)[targets]
        weights = segment_softmax(functional.leaky_relu(scores, 0.2), targets, count)
        parts = weights.unsqueeze(-1) * hidden[sources]
        summed = torch.zeros(count, *hidden.shape[1:], dtype=parts.dtype, device=x.device).index_add(0, targets, parts)
        result = summed.flatten(1) + self.bias
        return result if self.is_last else (functional.elu(result), *rest)


def segment_softmax(scores: Tensor, segments: Tensor, count: int) -> Tensor:
    """Returns the softmax of the scores within each segment, column by column."""
    index = segments.unsqueeze(1).expand_as(scores)
    peak = torch.full((count, scores.shape[1]), -math.inf, dtype=scores.dtype, device=scores.device)
    peak = peak.scatter_reduce(0, index, scores.detach(), "amax")
    raised = (scores - peak[segments]).exp()
    total = torch.zeros(count, scores.shape[1], dtype=raised.dtype, device=scores.device).index_add(0, segments, raised)
    return raised / total[segments]


def _std(name: str, shape: torch.Size) -> float:
    """Returns Glorot's standard deviation, as torch_geometric has it for attention; He's for other weights."""
    if name.rpartition(".")[2] in ("source", "target"):
        return math.sqrt(2 / sum(shape))
    return math.sqrt(2 / sum(shape)) if len(shape) == 2 else 1.0


class GraphNet(Chain):
    """GraphSAGE, a GCN or a GAT; each layer is a unit."""

    def __init__(self, size: GraphNetSize, *, seed: int = 0, device: torch.device | str | None = None):
        if size.features is None or size.classes is None:
            raise InputError(f"zoo:{size.kind} takes its number of features and classes from its data; open that first")
        count = len(size.fanouts)
        widths = (size.features, *(size.hidden,) * (count - 1), size.classes)
        layers = []
        with torch.device("meta"):
            for n in range(count):
                is_first, is_last = n == 0 and size.aggregates_on_host, n == count - 1
                if size.kind == "gat":
                    layer: nn.Module = GatLayer(widths[n], widths[n + 1], 1 if is_last else size.heads, is_last=is_last)
                else:
                    make = SageLayer if size.kind == "sage" else GcnLayer
                    layer = make(*widths[n : n + 2], is_first=is_first, is_last=is_last)
                layers.append((f"layer{n}", layer))
        super().__init__(layers, std=_std, seed=seed, device=device)


SIZES = {
    "sage": GraphNetSize(),
    "gcn": GraphNetSize(kind="gcn"),
    "gat": GraphNetSize(kind="gat", heads=4, hidden=128),
    "sage-3": GraphNetSize(fanouts=(10, 5, 5)),
}
"""Sizes by the name of the model."""
