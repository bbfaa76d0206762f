"""A graph of any size with few hubs and many small nodes, whose classes show in features and neighbours together.

Each node has a hidden class. Features are the centre of the class under much noise; a neighbour has the node's class in
`HOMOPHILY` of the cases. So a node's features alone tell little of its class, and those of its neighbours tell more.
Everything is made in chunks by all threads, and depends on the sizes and the seed alone.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from pipedejavu.facts import InputError
from pipedejavu.facts.file import fresh_path, remove
from pipedejavu.graph_data.csr_graph import ARRAYS, CsrGraph, check_memory, open_graph, save_manifest

DEGREE = 10
"""Mean number of neighbours."""
NUM_FEATURES, NUM_CLASSES = 256, 16
HOMOPHILY = 0.6
SIGNAL = 0.15
"""Standard deviation of the centres of classes, where the noise of a feature has 1."""
TRAIN_SHARE, TEST_SHARE = 0.1, 0.02
FEWEST_EDGES, MOST_EDGES = 1_000, 200_000_000
_CHUNK = 1 << 16
"""Nodes per chunk; part of what a seed determines."""
_FORMAT = 1
"""Part of the name of a folder; other contents have another number."""


def open_power_law(
    num_edges: int, root: Path, *, seed: int = 0, num_features: int = NUM_FEATURES, num_classes: int = NUM_CLASSES
) -> CsrGraph:
    """Opens the graph with about this many edges in a folder of `root`, and makes it if it is not there."""
    if not FEWEST_EDGES <= num_edges <= MOST_EDGES:
        raise InputError(
            f"graph:power:EDGES takes {FEWEST_EDGES} to {MOST_EDGES} edges, found {num_edges}; give a number in between"
        )
    folder = root / f"power-{num_edges}-{num_features}-{num_classes}-{seed}-v{_FORMAT}"
    if not (folder / "graph.json").is_file():
        check_memory(f"graph:power:{num_edges}", num_edges // DEGREE * num_features * 4 + num_edges * 4)
        _write(folder, num_edges, seed, num_features, num_classes)
    return open_graph(folder)


def _write(folder: Path, num_edges: int, seed: int, num_features: int, num_classes: int) -> None:
    """Writes the graph under a fresh name and renames the folder, so that readers see all of it or nothing."""
    temporary = fresh_path(folder)
    try:
        temporary.mkdir(parents=True)
        graph = _Maker(temporary, num_edges, seed, num_features, num_classes).make(folder.name)
        save_manifest(graph, temporary)
        del graph
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster, with the same contents
                raise
    except OSError as error:
        raise InputError(
            f"cannot write the graph to {folder.parent}: {error.strerror}; make room there, or set XDG_CACHE_HOME to"
            " another folder"
        ) from None
    finally:
        remove(temporary)


class _Maker:
    """Makes one graph in a folder, chunk by chunk."""

    def __init__(self, folder: Path, num_edges: int, seed: int, num_features: int, num_classes: int):
        self.folder, self.seed, self.num_classes = folder, seed, num_classes
        self.num_nodes = max(4 * num_classes, num_edges // DEGREE)
        self.num_edges, self.num_features = num_edges, num_features
        self.chunks = [(n, min(self.num_nodes, n + _CHUNK)) for n in range(0, self.num_nodes, _CHUNK)]
        random = self._random("centres", 0)
        self.centres = random.normal(0, SIGNAL, (num_classes, num_features)).astype(np.float32)
        self.factor = next(f for f in range(2 * self.num_nodes // 3, 2 * self.num_nodes) if gcd(f, self.num_nodes) == 1)

    def make(self, name: str) -> CsrGraph:
        """Makes all arrays."""
        indptr = self._array("indptr", self.num_nodes + 1)
        np.cumsum(np.concatenate(self._each(self._degrees)), out=indptr[1:])
        self.indptr = indptr
        self.indices = self._array("indices", int(indptr[-1]))
        self.features = self._array("features", self.num_nodes, self.num_features)
        self.labels = self._array("labels", self.num_nodes)
        self._each(self._fill)
        order = self._random("splits", 0).permutation(self.num_nodes)
        num_train, num_test = (max(1, int(share * self.num_nodes)) for share in (TRAIN_SHARE, TEST_SHARE))
        train, test = self._array("train", num_train), self._array("test", num_test)
        train[:], test[:] = np.sort(order[:num_train]), np.sort(order[num_train : num_train + num_test])
        arrays = {"indptr": indptr, "train": train, "test": test, "labels": self.labels, "indices": self.indices}
        for array in (*arrays.values(), self.features):
            array.flush()
        return CsrGraph(name=name, num_classes=self.num_classes, features=self.features, **arrays)

    def _each(self, call: Callable[[int, int, int], Any]) -> list[Any]:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with ThreadPoolExecutor(cores) as pool:
            return list(pool.map(lambda chunk: call(chunk[0] // _CHUNK, *chunk), self.chunks))

    def _random(self, what: str, chunk: int) -> np.random.Generator:
        key = [self.seed % (1 << 64), *what.encode(), chunk]
        return np.random.Generator(np.random.SFC64(np.random.SeedSequence(key)))

    def _array(self, name: str, *shape: int) -> Any:
        return open_memmap(self.folder / f"{name}.npy", "w+", ARRAYS[name][0], shape)

    def _degrees(self, chunk: int, first: int, last: int) -> NDArray[np.int64]:
        """Returns the number of neighbours of each node of a chunk: a power law with exponent 2.5."""
        drawn = self._random("degrees", chunk).random(last - first)
        mean = self.num_edges / self.num_nodes
        return np.minimum(mean / 3 / (1 - drawn) ** (2 / 3), min(self.num_nodes // 4, 10_000)).round().astype(np.int64)

    def _fill(self, chunk: int, first: int, last: int) -> None:
        """Makes the classes, features and neighbours of a chunk's nodes."""
        random, nodes = self._random("nodes", chunk), np.arange(first, last)
        # Nodes are numbered by rank times a factor, so that hubs are not next to each other in memory.
        labels = self._rank(nodes) % self.num_classes
        self.labels[first:last] = labels
        noise = random.standard_normal((last - first, self.num_features), np.float32)
        noise += self.centres[labels]
        self.features[first:last] = noise
        counts = np.diff(self.indptr[first : last + 1])
        rows = np.repeat(nodes, counts)
        self.indices[self.indptr[first] : self.indptr[last]] = self._neighbours(random, rows, np.repeat(labels, counts))

    def _neighbours(
        self, random: np.random.Generator, rows: NDArray[np.int64], labels: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Returns a neighbour for each edge: low ranks more often, mostly of the row's class."""
        of_class = self.num_nodes // self.num_classes
        rank = (of_class * random.random(len(rows)) ** 2).astype(np.int64)
        classes = random.integers(0, self.num_classes, len(rows))
        chosen = rank * self.num_classes + np.where(random.random(len(rows)) < HOMOPHILY, labels, classes)
        found = chosen * self.factor % self.num_nodes
        return np.where(found == rows, (found + 1) % self.num_nodes, found)

    def _rank(self, nodes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the ranks of nodes: the inverse of multiplying by the factor."""
        return nodes * pow(self.factor, -1, self.num_nodes) % self.num_nodes
