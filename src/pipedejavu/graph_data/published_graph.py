"""Published graphs, read from their usual files: Reddit, the .npz of the GNN benchmark, and folders of OGB.

No file is unpickled, as that can run code. Edges are taken in both directions, once each, without those from a node to
itself.
"""

import gzip
import zipfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipedejavu.facts import InputError
from pipedejavu.facts.file import check_file
from pipedejavu.graph_data.csr_graph import CsrGraph, check_memory, open_graph, save_graph

TEST_SHARE = 0.2
"""Of the labelled nodes of a graph without splits."""
_REDDIT = ("reddit_data.npz", "reddit_graph.npz")
_OGB = ("edge.csv.gz", "node-feat.csv.gz", "node-label.csv.gz")
_NPZ = frozenset(("adj_indices", "adj_indptr", "adj_shape", "labels"))


def open_published(path: Path, root: Path) -> CsrGraph:
    """Opens a graph from its usual files; the arrays that are made of them are kept in a folder of `root`."""
    files = _files(path)
    try:
        status = [(str(file), check_file(file).st_size, check_file(file).st_mtime_ns) for file in files]
    except OSError as error:
        raise InputError(f"cannot read {error.filename or path}: {error.strerror}") from None
    folder = root / f"{path.stem}-{sha256(repr(status).encode()).hexdigest()[:16]}"
    if not (folder / "graph.json").is_file():
        save_graph(_read(path, files), folder)
    return open_graph(folder)


def _files(path: Path) -> list[Path]:
    """Returns the files of a graph; raises InputError if they are not those of a known form."""
    if path.suffix == ".npz":
        return [path]
    if all((path / name).is_file() for name in _REDDIT):
        return [path / name for name in _REDDIT]
    if all((path / "raw" / name).is_file() for name in _OGB):
        return [*(path / "raw" / name for name in _OGB), *sorted(path.glob("split/*/*.csv.gz"))]
    if pickles := sorted(path.glob("**/ind.*.*")):
        raise InputError(
            f"{pickles[0]} is a pickle, as Planetoid's files are, and reading one can run code; give the same graph as"
            " .npz, as the GNN benchmark has it, or write it with pipedejavu.graph_data.save_graph"
        )
    raise InputError(
        f"{path} holds no graph: there is no graph.json, no reddit_data.npz with reddit_graph.npz, and no"
        " raw/edge.csv.gz of OGB; write one with pipedejavu.graph_data.save_graph"
    )


def _read(path: Path, files: list[Path]) -> CsrGraph:
    if path.suffix == ".npz":
        return _benchmark(path)
    return _reddit(*files) if len(files) == 2 else _ogb(path, files)


def _benchmark(path: Path) -> CsrGraph:
    arrays = _arrays(path)
    if missing := sorted(_NPZ - arrays.keys()):
        raise InputError(f"{path} has no array '{missing[0]}', and a graph in one .npz needs {', '.join(sorted(_NPZ))}")
    count = int(arrays["adj_shape"][0])
    rows = np.repeat(np.arange(count), np.diff(arrays["adj_indptr"]))
    if "attr_matrix" in arrays:
        features = arrays["attr_matrix"].astype(np.float32)
    else:
        features = np.zeros(arrays["attr_shape"], np.float32)
        features[np.repeat(np.arange(len(features)), np.diff(arrays["attr_indptr"])), arrays["attr_indices"]] = arrays[
            "attr_data"
        ]
    labels = arrays["labels"].astype(np.int64)
    return _graph(path.stem, rows, arrays["adj_indices"], features, labels)


def _reddit(data: Path, graph: Path) -> CsrGraph:
    about, edges = _arrays(data), _arrays(graph)
    if "row" in edges:
        rows, columns = edges["row"], edges["col"]
    else:
        rows, columns = np.repeat(np.arange(len(edges["indptr"]) - 1), np.diff(edges["indptr"])), edges["indices"]
    kinds = about["node_types"]
    splits = np.flatnonzero(kinds == 1), np.flatnonzero(kinds == 3)
    return _graph("reddit", rows, columns, about["feature"], about["label"].astype(np.int64), splits)


def _ogb(path: Path, files: list[Path]) -> CsrGraph:
    edges, features, labels = (_table(file, dtype) for file, dtype in zip(files, _OGB_TYPES, strict=False))
    named = {file.name.partition(".")[0]: file for file in files[3:]}
    splits = None
    if {"train", "test"} <= named.keys():
        splits = _table(named["train"], np.int64)[:, 0], _table(named["test"], np.int64)[:, 0]
    whole = np.nan_to_num(labels[:, 0], nan=-1).astype(np.int64)
    return _graph(path.name, edges[:, 0], edges[:, 1], features, whole, splits)


_OGB_TYPES = (np.int64, np.float32, np.float64)


def _graph(
    name: str,
    rows: NDArray[Any],
    columns: NDArray[Any],
    features: NDArray[Any],
    labels: NDArray[np.int64],
    splits: tuple[NDArray[Any], NDArray[Any]] | None = None,
) -> CsrGraph:
    """Returns a graph from its edges, with random splits if it has none."""
    count = len(labels)
    rows, columns = rows.astype(np.int64), columns.astype(np.int64)
    if len(rows) and (min(rows.min(), columns.min()) < 0 or max(rows.max(), columns.max()) >= count):
        worst = int(max(rows.max(), columns.max()))
        raise InputError(f"the graph {name} has an edge of node {worst}, and nodes are 0 to {count - 1}")
    keys = np.unique(np.concatenate([rows * count + columns, columns * count + rows]))
    keys = keys[keys // max(1, count) != keys % max(1, count)]
    indptr = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(keys // count, minlength=count), out=indptr[1:])
    if splits is None:
        order = np.random.Generator(np.random.SFC64(0)).permutation(np.flatnonzero(labels >= 0))
        num_test = max(1, int(TEST_SHARE * len(order)))
        splits = np.sort(order[num_test:]), np.sort(order[:num_test])
    train, test = splits
    return CsrGraph(
        name=name, indptr=indptr, indices=(keys % count).astype(np.int32),
        features=np.ascontiguousarray(features, np.float32), labels=labels, train=train.astype(np.int64),
        test=test.astype(np.int64), num_classes=max(2, int(labels.max(initial=0)) + 1),
    )  # fmt: skip


def _arrays(path: Path) -> Mapping[str, NDArray[Any]]:
    """Returns the arrays of an .npz, none of which may hold objects."""
    try:
        with zipfile.ZipFile(path) as archive:
            check_memory(str(path), sum(member.file_size for member in archive.infolist()))
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files if name not in _OBJECTS}
    except InputError:
        raise
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise InputError(f"cannot read {path}: {error}") from None


_OBJECTS = frozenset(("node_names", "attr_names", "class_names", "format", "metadata"))
"""Arrays of the known files that may be pickled, and are not needed."""


def _table(path: Path, dtype: Any) -> NDArray[Any]:
    try:
        with gzip.open(path, "rt") as lines:
            return np.loadtxt(lines, dtype=dtype, delimiter=",", ndmin=2)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
