"""Graphs in host memory: the neighbours of each node, features, labels and splits, mapped from a folder.

A folder holds a manifest `graph.json` and one `.npy` file per array. The neighbours of node n, whose messages n
receives, are `indices[indptr[n]:indptr[n + 1]]`.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from pipedejavu.facts import InputError, Record, format_bytes

ARRAYS = {
    "indptr": ("int64", 1),
    "indices": ("int32", 1),
    "features": ("float32", 2),
    "labels": ("int64", 1),
    "train": ("int64", 1),
    "test": ("int64", 1),
}
"""The arrays of a folder, each with its type and its number of dimensions."""
MANIFEST = "graph.json"
_CHUNK = 1 << 22
"""Edges or numbers that are checked at once."""


class GraphManifest(Record):
    """What a folder's arrays are, and which of their contents were checked."""

    name: str
    num_nodes: int = Field(ge=1)
    num_edges: int = Field(ge=0)
    num_features: int = Field(ge=1)
    num_classes: int = Field(ge=2)
    checked: dict[str, tuple[int, int]] = Field(default_factory=dict)
    """Size and time of change, in ns, of each file whose contents were checked."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CsrGraph:
    """A graph whose nodes have features and a class each; in compressed sparse rows."""

    name: str
    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    features: NDArray[np.float32]
    labels: NDArray[np.int64]
    """The class of each node; -1 for a node without one, which cannot be a target."""
    train: NDArray[np.int64]
    """The nodes to train on."""
    test: NDArray[np.int64]
    """The nodes to evaluate on."""
    num_classes: int

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return len(self.indptr) - 1

    @property
    def num_features(self) -> int:
        """The number of features of a node."""
        return int(self.features.shape[1])

    @property
    def size_bytes(self) -> int:
        """The bytes of all arrays."""
        return sum(getattr(self, name).nbytes for name in ARRAYS)


def graph_cache() -> Path:
    """Returns the folder of graphs that were made: in XDG_CACHE_HOME if that is set, else in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pipedejavu" / "graphs"


def open_graph(folder: str | Path) -> CsrGraph:
    """Maps the graph in a folder; checks it once, and again if a file has changed."""
    path = Path(folder)
    if not (path / MANIFEST).is_file():
        raise InputError(
            f"{path} holds no graph: it has no {MANIFEST}; write one with pipedejavu.graph_data.save_graph"
        )
    manifest = GraphManifest.load(path / MANIFEST)
    arrays = {name: _mapped(path, name) for name in ARRAYS}
    graph = CsrGraph(name=manifest.name, num_classes=manifest.num_classes, **arrays)
    check_memory(str(path), graph.size_bytes)
    stamps = _stamps(path)
    if manifest.checked != stamps:
        check_graph(graph, manifest)
        with suppress(InputError):  # a folder that cannot be written is checked each time
            manifest.replace(checked=stamps).save(path / MANIFEST)
    return graph


def save_graph(graph: CsrGraph, folder: str | Path) -> None:
    """Checks a graph and writes it to a folder, which may exist."""
    check_graph(graph)
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name, (dtype, _) in ARRAYS.items():
            np.save(path / f"{name}.npy", np.ascontiguousarray(getattr(graph, name), dtype))
    except OSError as error:
        raise InputError(f"cannot write the graph to {path}: {error.strerror}") from None
    save_manifest(graph, path)


def save_manifest(graph: CsrGraph, path: Path) -> None:
    """Writes the manifest of a graph whose arrays are in a folder, and are known to be sound."""
    manifest = GraphManifest(
        name=graph.name,
        num_nodes=graph.num_nodes,
        num_edges=len(graph.indices),
        num_features=graph.num_features,
        num_classes=graph.num_classes,
        checked=_stamps(path),
    )
    manifest.save(path / MANIFEST)


def check_memory(name: str, size_bytes: int) -> None:
    """Raises InputError if a graph exceeds the host's memory: its rows are read at random places."""
    held = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size_bytes > held:
        raise InputError(
            f"the graph {name} takes {format_bytes(size_bytes)} and this host has {format_bytes(held)} of memory; give"
            " a graph with fewer edges or features, or a host with more memory"
        )


def check_graph(graph: CsrGraph, manifest: GraphManifest | None = None) -> None:
    """Raises InputError for a graph that cannot be trained on: with the first node that is wrong, and what to do."""
    fault = next(_faults(graph, manifest), None)
    if fault is not None:
        raise InputError(f"the graph {graph.name} {fault}")


def _faults(graph: CsrGraph, manifest: GraphManifest | None) -> Iterator[str]:
    count, edges = graph.num_nodes, len(graph.indices)
    if manifest is not None:
        for what, stated, actual in (
            ("nodes", manifest.num_nodes, count),
            ("edges", manifest.num_edges, edges),
            ("features", manifest.num_features, graph.num_features),
        ):
            if stated != actual:
                yield f"has {actual} {what} in its arrays and {stated} in {MANIFEST}; write both together"
    yield from _structure_faults(graph, count, edges)
    yield from _feature_faults(graph, count)
    yield from _label_faults(graph, count)


def _structure_faults(graph: CsrGraph, count: int, edges: int) -> Iterator[str]:
    indptr = graph.indptr
    if count < 1 or indptr[0] != 0 or indptr[-1] != edges or (np.diff(indptr) < 0).any():
        yield f"has row pointers that do not rise from 0 to its {edges} edges; give indptr of a CSR matrix"
        return
    for first in range(0, edges, _CHUNK):
        part = graph.indices[first : first + _CHUNK]
        wrong = np.flatnonzero((part < 0) | (part >= count))
        if len(wrong):
            node = int(np.searchsorted(indptr, first + wrong[0], side="right")) - 1
            yield (
                f"has a dangling edge: node {node} names node {int(part[wrong[0]])} as its neighbour, and nodes are 0"
                f" to {count - 1}; remove the edge or add the node"
            )
            return
    for first in range(0, count, _CHUNK):
        last = min(count, first + _CHUNK)
        part = graph.indices[indptr[first] : indptr[last]]
        rows = np.repeat(np.arange(first, last), np.diff(indptr[first : last + 1]))
        own = np.flatnonzero(part == rows)
        if len(own):
            yield (
                f"names node {int(rows[own[0]])} as its own neighbour; models add the node itself, so remove such edges"
            )
            return


def _feature_faults(graph: CsrGraph, count: int) -> Iterator[str]:
    features = graph.features
    if features.ndim != 2 or len(features) != count or features.shape[1] < 1:
        yield (
            f"has features of shape {tuple(features.shape)} for {count} nodes; give one row of equal length per node"
        )
        return
    rows = max(1, _CHUNK // features.shape[1])
    for first in range(0, count, rows):
        part = features[first : first + rows]
        if not np.isfinite(part.sum()):
            bad = np.argwhere(~np.isfinite(part))
            if len(bad):
                row, column = map(int, bad[0])
                yield (
                    f"has the feature {part[row, column]} at node {first + row}, column {column}; replace what is not"
                    " finite"
                )
                return


def _label_faults(graph: CsrGraph, count: int) -> Iterator[str]:
    labels = graph.labels
    if len(labels) != count or (labels < 0).all():
        yield f"has no labels for its {count} nodes; give each node a class, -1 for those without one"
        return
    if labels.max() >= graph.num_classes:
        yield f"has the label {int(labels.max())} and {graph.num_classes} classes; number the classes from 0"
    for name in ("train", "test"):
        nodes = getattr(graph, name)
        if not len(nodes):
            yield f"has an empty {name} split; give it at least one node with a label"
            continue
        if nodes.min() < 0 or nodes.max() >= count:
            yield f"has node {int(nodes.max())} in its {name} split, and nodes are 0 to {count - 1}"
            continue
        unlabelled = nodes[labels[nodes] < 0]
        if len(unlabelled):
            yield f"has node {int(unlabelled[0])} without a label in its {name} split; leave it out of the split"


def _mapped(path: Path, name: str) -> NDArray[Any]:
    """Maps one array of a folder, which must have its type and shape."""
    file, (dtype, ndim) = path / f"{name}.npy", ARRAYS[name]
    try:
        array: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = getattr(error, "strerror", None) or "it is no array that can be mapped"
        raise InputError(f"cannot read {file}: {reason}") from None
    if array.dtype != dtype or array.ndim != ndim or not array.flags.c_contiguous:
        raise InputError(f"{file} holds {array.dtype} in {array.ndim} dimensions; give {dtype} in {ndim}, row by row")
    return array


def _stamps(path: Path) -> dict[str, tuple[int, int]]:
    """Returns the size and the time of change of each file of a folder."""
    status = {name: (path / f"{name}.npy").stat() for name in ARRAYS}
    return {name: (each.st_size, each.st_mtime_ns) for name, each in status.items()}
