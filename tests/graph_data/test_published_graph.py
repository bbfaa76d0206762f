"""Graphs from the files in which they are published."""

import gzip

import numpy as np
import pytest

from pipedejavu.facts import InputError
from pipedejavu.graph_data import open_published

ROWS, COLUMNS = np.array([0, 1, 1, 2, 3]), np.array([1, 0, 2, 2, 0])
EDGES = {(0, 1), (1, 0), (1, 2), (2, 1), (0, 3), (3, 0)}
FEATURES, LABELS = np.arange(8, dtype=np.float32).reshape(4, 2), np.array([0, 1, 1, 0])


def edges_of(graph) -> set[tuple[int, int]]:
    rows = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    return {*zip(rows.tolist(), graph.indices.tolist(), strict=True)}


def write_table(path, array) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        np.savetxt(file, np.asarray(array).reshape(len(array), -1), fmt="%g", delimiter=",")


def test_reddits_files_are_read(tmp_path) -> None:
    types = np.array([1, 1, 2, 3])
    np.savez(tmp_path / "reddit_data.npz", feature=FEATURES, label=LABELS, node_types=types)
    np.savez(tmp_path / "reddit_graph.npz", row=ROWS, col=COLUMNS, data=np.ones(5), shape=[4, 4])
    graph = open_published(tmp_path, tmp_path / "cache")
    assert edges_of(graph) == EDGES
    assert (graph.train.tolist(), graph.test.tolist()) == ([0, 1], [3])
    assert np.array_equal(graph.features, FEATURES)


def test_an_npz_of_the_gnn_benchmark_is_read(tmp_path) -> None:
    adjacency = {"adj_indptr": [0, 1, 3, 4, 5], "adj_indices": [1, 0, 2, 2, 0], "adj_shape": [4, 4]}
    attributes = {"attr_indptr": [0, 1, 2, 2, 3], "attr_indices": [0, 1, 1], "attr_data": [5.0, 6.0, 7.0]}
    names = {"node_names": np.array([{}], object)}
    np.savez(tmp_path / "cora.npz", **adjacency, **attributes, attr_shape=[4, 2], labels=LABELS, **names)
    graph = open_published(tmp_path / "cora.npz", tmp_path / "cache")
    assert edges_of(graph) == EDGES
    assert graph.features.tolist() == [[5, 0], [0, 6], [0, 0], [0, 7]]
    assert sorted([*graph.train.tolist(), *graph.test.tolist()]) == [0, 1, 2, 3]


def test_a_folder_of_ogb_is_read(tmp_path) -> None:
    write_table(tmp_path / "raw/edge.csv.gz", np.stack([ROWS, COLUMNS], 1))
    write_table(tmp_path / "raw/node-feat.csv.gz", FEATURES)
    write_table(tmp_path / "raw/node-label.csv.gz", LABELS)
    for name, nodes in (("train", [0, 2]), ("valid", [1]), ("test", [3])):
        write_table(tmp_path / f"split/time/{name}.csv.gz", np.array(nodes))
    graph = open_published(tmp_path, tmp_path / "cache")
    assert edges_of(graph) == EDGES
    assert (graph.train.tolist(), graph.test.tolist(), graph.labels.tolist()) == ([0, 2], [3], LABELS.tolist())


def test_pickles_are_refused_and_other_folders_too(tmp_path) -> None:
    with pytest.raises(InputError, match=r"holds no graph: there is no graph\.json, no reddit_data\.npz"):
        open_published(tmp_path, tmp_path / "cache")
    (tmp_path / "ind.cora.x").write_bytes(b"\x80")
    with pytest.raises(
        InputError, match=r"ind\.cora\.x is a pickle, as Planetoid's files are, and reading one can run"
    ):
        open_published(tmp_path, tmp_path / "cache")


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"labels": LABELS}, r"has no array 'adj_indices', and a graph in one \.npz needs adj_indices"),
        ({"labels": np.array([{}], object)}, r"cannot read .*other\.npz: Object arrays cannot be loaded"),
    ],
)
def test_a_bad_npz_is_refused(tmp_path, arrays, sentence) -> None:
    np.savez(tmp_path / "other.npz", **arrays)
    with pytest.raises(InputError, match=sentence):
        open_published(tmp_path / "other.npz", tmp_path / "cache")
    (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04")
    with pytest.raises(InputError, match=r"cannot read .*torn\.npz"):
        open_published(tmp_path / "torn.npz", tmp_path / "cache")
