"""Nodes of a graph as samples: each comes with the sampled neighbourhood that a graph network reads.

Times of sampling and of gathering are added up, because a plan's threads follow them.
"""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipedejavu.facts import InputError
from pipedejavu.graph_data import (
    Block,
    CsrGraph,
    NeighbourSampler,
    Rows,
    open_code_graph,
    open_graph,
    open_power_law,
    open_published,
)
from pipedejavu.graph_data.csr_graph import MANIFEST
from pipedejavu.zoo.dataset import Indices, check_indices
from pipedejavu.zoo.form import GraphForm
from pipedejavu.zoo.image import Split

EVALUATION_STEP = -1
"""The step whose neighbourhoods are sampled if no training step asks."""


def open_graph_data(detail: str, form: GraphForm, root: Path, *, seed: int, split: Split) -> "GraphSamples":
    """Opens 'power:EDGES', 'stdlib' or a folder, and the nodes of one of its splits."""
    kind, _, edges = detail.partition(":")
    if kind == "power":
        if not edges.isdecimal() or len(edges) > 12:
            raise InputError(f"graph:power:EDGES takes a number of edges, found '{edges}'; write graph:power:100000")
        graph = open_power_law(int(edges), root)
    elif detail == "stdlib":
        graph = open_code_graph(root)
    elif detail:
        has_manifest = (Path(detail) / MANIFEST).is_file()
        graph = open_graph(detail) if has_manifest else open_published(Path(detail), root)
    else:
        raise InputError("data 'graph' needs a detail; write graph:power:EDGES, graph:stdlib or graph:FOLDER")
    for what, asked, there in (
        ("features", form.features, graph.num_features),
        ("classes", form.classes, graph.num_classes),
    ):
        if asked is not None and asked != there:
            raise InputError(
                f"the model reads {asked} {what} and the graph {graph.name} has {there}; build it for these"
            )
    return GraphSamples(graph, graph.train if split == "train" else graph.test, form, seed)


class GraphSamples:
    """Some nodes of a graph; sample n is the n-th of them, with neighbours that depend on the seed and the step."""

    def __init__(
        self, graph: CsrGraph, nodes: NDArray[np.int64], form: GraphForm, seed: int, *, is_native: bool | None = None
    ):
        self.graph, self.form = graph, form
        self._nodes = np.ascontiguousarray(nodes, np.int64)
        self._seed, self._is_native = seed, is_native
        self._sampler: NeighbourSampler | None = None
        self.sample_s = self.gather_s = self.busy_s = 0.0
        """Seconds that calls have sampled, have gathered, and in which any call was running."""
        self._lock, self._num_running, self._since_s = threading.Lock(), 0, 0.0
        self.num_drawn = 0
        self.pins = False
        """Whether features are gathered into pinned memory."""
        self.num_threads: int | None = None
        """Threads that sample and gather; by default as many as torch has."""

    def __len__(self) -> int:
        return len(self._nodes)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the sampler and the lock, which stay in this process."""
        return {**self.__dict__, "_sampler": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {**state, "_lock": threading.Lock(), "_num_running": 0}

    @property
    def features(self) -> int:
        """Features of a node."""
        return self.graph.num_features

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.graph.num_classes

    @property
    def sampler(self) -> NeighbourSampler:
        """The sampler, with the threads that are asked for now."""
        threads = self.num_threads or torch.get_num_threads()
        if self._sampler is None or self._sampler.num_threads != threads:
            self._sampler = NeighbourSampler(self.graph, self._seed, num_threads=threads, is_native=self._is_native)
        return self._sampler

    def batch(self, indices: Indices) -> tuple[Any, Tensor]:
        """Returns the inputs and classes of some nodes, with the neighbourhoods of evaluation."""
        return self.drawn(indices, EVALUATION_STEP)

    def drawn(self, indices: Indices, step: int) -> tuple[Any, Tensor]:
        """Returns the inputs and classes of some nodes, with the neighbourhoods of a training step."""
        with self._lock:
            self._since_s = self._since_s if self._num_running else time.perf_counter()
            self._num_running += 1
        try:
            return self._drawn(indices, step)
        finally:
            with self._lock:
                self._num_running -= 1
                self.busy_s += 0.0 if self._num_running else time.perf_counter() - self._since_s

    def _drawn(self, indices: Indices, step: int) -> tuple[Any, Tensor]:
        targets = self._nodes[check_indices(indices, len(self)).numpy()]
        labels = torch.from_numpy(self.graph.labels[targets])
        started = time.perf_counter()
        *inner, outer = self.form.fanouts
        is_aggregated = self.form.aggregates_on_host
        sampler, nodes, blocks = self.sampler, targets, list[Block]()
        for hop, fanout in enumerate(inner if is_aggregated else self.form.fanouts):
            blocks.append(sampler.block(nodes, sampler.rows(nodes, fanout, step, hop)))
            nodes = blocks[-1].nodes
        rows = sampler.rows(nodes, outer, step, len(inner)) if is_aggregated else None
        sampled = time.perf_counter()
        inputs = self._first(nodes, rows)
        self.num_drawn += 1
        self.sample_s += sampled - started
        self.gather_s += time.perf_counter() - sampled
        edges = [self._edges(block, fanout) for block, fanout in zip(blocks, self.form.fanouts, strict=False)]
        flow = (*inputs, *(tensor for part in reversed(edges) for tensor in part))
        return (flow if len(flow) > 1 else flow[0]), labels

    def _first(self, nodes: NDArray[np.int64], rows: Rows | None) -> Sequence[Tensor]:
        """Returns what the first layer reads of the nodes of the outermost block."""
        if rows is None:
            return [self._gathered(nodes)]
        if self.form.aggregation == "mean":
            return [self._aggregated(rows, None), self._gathered(nodes)]
        joined = _with_own(rows, nodes)
        return [self._aggregated(joined, self._weights(nodes, joined, joined.found, self.form.fanouts[-1]))]

    def _edges(self, block: Block, fanout: int) -> Sequence[Tensor]:
        """Returns a block as tensors; of a GCN with each node as its own neighbour, and with the weights."""
        if self.form.aggregation != "symmetric":
            return [torch.from_numpy(block.indptr), torch.from_numpy(block.indices)]
        count = len(block.indptr) - 1
        joined = _with_own(Rows(block.indptr, block.indices), np.arange(count))
        weights = self._weights(block.nodes[:count], joined, block.nodes[joined.found], fanout)
        edges = [torch.from_numpy(part) for part in joined]
        return [*edges, torch.from_numpy(weights).to(torch.get_default_dtype())]

    def _weights(
        self, nodes: NDArray[np.int64], joined: Rows, found: NDArray[np.int64], fanout: int
    ) -> NDArray[np.float64]:
        """Returns the symmetric weight of each edge: 1 / √(s·t).

        Here s and t are one more than the neighbours that the edge's ends sample in this layer. So a weight depends on
        its two nodes alone, and not on the batch.
        """
        rows = np.repeat(self._scale(nodes, fanout), np.diff(joined.indptr))
        return rows * self._scale(found, fanout)

    def _scale(self, nodes: NDArray[np.int64], fanout: int) -> NDArray[np.float64]:
        degrees = self.graph.indptr[nodes + 1] - self.graph.indptr[nodes]
        scale: NDArray[np.float64] = 1 / np.sqrt((degrees if fanout < 0 else np.minimum(degrees, fanout)) + 1.0)
        return scale

    def _gathered(self, nodes: NDArray[np.int64]) -> Tensor:
        out = self._empty(len(nodes))
        self.sampler.gather(nodes, out.numpy())
        return out.to(torch.get_default_dtype())

    def _aggregated(self, rows: Rows, weights: NDArray[np.float64] | None) -> Tensor:
        out = self._empty(len(rows.indptr) - 1, torch.get_default_dtype())
        self.sampler.aggregate(rows, weights, out.numpy())
        return out

    def _empty(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(count, self.features, dtype=dtype, device="cpu", pin_memory=self.pins)


def _with_own(rows: Rows, own: NDArray[np.int64]) -> Rows:
    """Returns rows with each row's own node before its neighbours."""
    return Rows(rows.indptr + np.arange(len(rows.indptr)), np.insert(rows.found, rows.indptr[:-1], own))
