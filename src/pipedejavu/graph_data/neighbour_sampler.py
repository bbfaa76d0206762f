"""Samples neighbours as a pure function of (seed, step, hop, node), and gathers the features of what it found.

A node's sampled neighbours do not depend on the other nodes of a batch. So a batch that is divided between trainers
trains on the same neighbourhoods as the whole batch, and a replay samples them again.

    hop 0: targets      ← up to fanouts[0] neighbours each   = block 0
    hop 1: all of those ← up to fanouts[1] neighbours each   = block 1
"""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipedejavu.facts import InputError
from pipedejavu.graph_data.csr_graph import CsrGraph
from pipedejavu.graph_data.native_sampler import LIBRARY, sampler_library

ALL = -1
"""The fan-out that takes every neighbour."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


class Rows(NamedTuple):
    """The sampled neighbours of some nodes: row n has `found[indptr[n]:indptr[n + 1]]`, numbered as in the graph."""

    indptr: Ints
    found: Ints


class Block(NamedTuple):
    """Sampled neighbours by their position among the block's nodes, of which the first are the targets."""

    nodes: Ints
    indptr: Ints
    indices: Ints


def parse_fanouts(text: str) -> tuple[int, ...]:
    """Reads fan-outs such as '10,5', the first of them for the targets; 'all' takes every neighbour."""
    fanouts = []
    for part in text.split(","):
        word = part.strip()
        if word == "all":
            fanouts.append(ALL)
        elif word.isdecimal() and 0 < int(word) < 1 << 20:
            fanouts.append(int(word))
        else:
            raise InputError(
                f"--fanout is a number of neighbours per layer, such as 10,5, and '{word}' is none; give numbers from 1"
                " to 1048575, or 'all' for every neighbour"
            )
    return tuple(fanouts)


class NeighbourSampler:
    """Samples the neighbours of one graph; native if the library was built. Can be called by several threads."""

    def __init__(self, graph: CsrGraph, seed: int, *, num_threads: int = 1, is_native: bool | None = None):
        self.graph, self.num_threads = graph, max(1, num_threads)
        self._seed = np.uint64(seed % (1 << 64))
        self._library: Any = sampler_library() if is_native is not False else None
        if is_native and self._library is None:
            raise RuntimeError(f"{LIBRARY} was not built; install the package where there is a C compiler")
        self._slots: list[NDArray[np.int32]] = []
        """Free tables of `pdv_relabel_1`: each call takes one and gives it back."""
        self._lock = threading.Lock()

    @property
    def is_native(self) -> bool:
        """Whether the library is used."""
        return self._library is not None

    def rows(self, nodes: Ints, fanout: int, step: int, hop: int) -> Rows:
        """Samples up to `fanout` different neighbours of each node."""
        nodes = np.ascontiguousarray(nodes, np.int64)
        degrees = self.graph.indptr[nodes + 1] - self.graph.indptr[nodes]
        counts = degrees if fanout == ALL else np.minimum(degrees, fanout)
        indptr = np.zeros(len(nodes) + 1, np.int64)
        np.cumsum(counts, out=indptr[1:])
        with np.errstate(over="ignore"):
            key = _mix(_mix(_mix(self._seed) + np.uint64(step % (1 << 64))) + np.uint64(hop))
        if self._library is None:
            return Rows(indptr, _sample(self.graph, nodes, degrees, indptr, key))
        found = np.empty(indptr[-1], np.int64)
        self._library.pdv_sample_2(
            self.graph.indptr.ctypes.data, self.graph.indices.ctypes.data, nodes.ctypes.data, len(nodes), int(key),
            indptr.ctypes.data, found.ctypes.data, self.num_threads,
        )  # fmt: skip
        return Rows(indptr, found)

    def block(self, targets: Ints, rows: Rows) -> Block:
        """Numbers the nodes of sampled rows: the targets, then others in the order in which they were found."""
        targets = np.ascontiguousarray(targets, np.int64)
        if self._library is None:
            nodes, local = _relabel(targets, rows.found)
            return Block(nodes, rows.indptr, local)
        nodes, local = np.empty(len(targets) + len(rows.found), np.int64), np.empty(len(rows.found), np.int64)
        with self._lock:
            slot = self._slots.pop() if self._slots else np.full(self.graph.num_nodes, -1, np.int32)
        count = self._library.pdv_relabel_1(
            slot.ctypes.data, targets.ctypes.data, len(targets), rows.found.ctypes.data, len(rows.found),
            nodes.ctypes.data, local.ctypes.data,
        )  # fmt: skip
        with self._lock:
            self._slots.append(slot)
        return Block(nodes[:count], rows.indptr, local)

    def gather(self, nodes: Ints, out: Floats) -> None:
        """Copies the features of some nodes."""
        features = self.graph.features
        if self._library is None:
            np.take(features, nodes, axis=0, out=out)
            return
        nodes = np.ascontiguousarray(nodes, np.int64)
        self._library.pdv_gather_2(
            features.ctypes.data, features.shape[1], nodes.ctypes.data, len(nodes), out.ctypes.data, self.num_threads
        )

    def aggregate(self, rows: Rows, weights: NDArray[Any] | None, out: NDArray[Any]) -> None:
        """Writes the mean features of each row's neighbours or, with weights, their weighted sum.

        It computes in the type of `out`; only float32 is native.
        """
        features = self.graph.features
        if self._library is None or out.dtype != np.float32:
            _aggregate(features, rows, weights, out)
            return
        weights = None if weights is None else np.ascontiguousarray(weights, np.float32)
        address = None if weights is None else weights.ctypes.data
        self._library.pdv_aggregate_2(
            features.ctypes.data, features.shape[1], rows.found.ctypes.data, rows.indptr.ctypes.data, address,
            len(rows.indptr) - 1, out.ctypes.data, self.num_threads,
        )  # fmt: skip


def _mix(x: Any) -> Any:
    """Returns 64 well-mixed bits for each number: the step of SplitMix64."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _sample(graph: CsrGraph, nodes: Ints, degrees: Ints, indptr: Ints, key: Any) -> Ints:
    """Returns what `pdv_sample_1` writes: Floyd's algorithm on all nodes at once."""
    counts, begins = np.diff(indptr), graph.indptr[nodes]
    offsets = np.arange(indptr[-1]) - np.repeat(indptr[:-1], counts)
    chosen = np.where(np.repeat(counts == degrees, counts), offsets, -1)
    drawing = np.flatnonzero(counts < degrees)
    most_drawn = int(counts[drawing].max(initial=0))
    starts = _mix(key ^ _mix(nodes[drawing].astype(np.uint64)))
    table = np.full((len(drawing), most_drawn), -1, np.int64)
    for j in range(most_drawn):
        most = (degrees[drawing] - counts[drawing] + j).astype(np.uint64)
        with np.errstate(over="ignore"):
            bits = _mix(starts + np.uint64(j)) >> np.uint64(32)
        drawn = ((bits * (most + np.uint64(1))) >> np.uint64(32)).astype(np.int64)
        is_known = (table[:, :j] == drawn[:, None]).any(1)
        table[:, j] = np.where(is_known, most.astype(np.int64), drawn)
    is_drawn = np.arange(most_drawn) < counts[drawing][:, None]
    chosen[chosen < 0] = table[is_drawn]
    return graph.indices[np.repeat(begins, counts) + chosen].astype(np.int64)


def _relabel(targets: Ints, found: Ints) -> tuple[Ints, Ints]:
    """Returns what `pdv_relabel_1` writes."""
    together = np.concatenate([targets, found])
    unique, first, inverse = np.unique(together, return_index=True, return_inverse=True)
    is_new = first >= len(targets)
    by_first = np.argsort(first[is_new], kind="stable")
    labels = first.copy()
    ranks = np.empty(len(by_first), np.int64)
    ranks[by_first] = np.arange(len(by_first))
    labels[is_new] = len(targets) + ranks
    nodes = np.concatenate([targets, unique[is_new][by_first]])
    return nodes, labels[inverse.reshape(-1)[len(targets) :]].astype(np.int64)


def _aggregate(features: Floats, rows: Rows, weights: NDArray[Any] | None, out: NDArray[Any]) -> None:
    """Writes what `pdv_aggregate_1` writes: the n-th neighbours of all rows, one after the other."""
    counts = np.diff(rows.indptr)
    out[:] = 0
    for n in range(int(counts.max(initial=0))):
        has = np.flatnonzero(counts > n)
        at = rows.indptr[has] + n
        x = features[rows.found[at]].astype(out.dtype, copy=False)
        out[has] += x if weights is None else weights[at].astype(out.dtype)[:, None] * x
    if weights is None:
        out /= np.maximum(counts, 1).astype(out.dtype)[:, None]


def check_fanouts(fanouts: Sequence[int], num_layers: int) -> None:
    """Raises InputError if there is not one fan-out for each layer."""
    if len(fanouts) != num_layers:
        raise InputError(
            f"the model has {num_layers} layers and --fanout gives {len(fanouts)} numbers; give one for each layer, the"
            " first for the neighbours of the targets"
        )
