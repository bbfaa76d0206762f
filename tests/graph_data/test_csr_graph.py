"""Graphs in folders: what is written is read again, and each fault of a graph has its sentence."""

import numpy as np
import pytest

from pipedejavu.facts import InputError
from pipedejavu.graph_data import CsrGraph, check_graph, csr_graph, open_graph, save_graph


def graph(**changes) -> CsrGraph:
    """Four nodes in a ring."""
    fields = {
        "name": "ring",
        "indptr": np.array([0, 1, 2, 3, 4]),
        "indices": np.array([1, 2, 3, 0], np.int32),
        "features": np.ones((4, 2), np.float32),
        "labels": np.array([0, 1, 0, -1]),
        "train": np.array([0, 1]),
        "test": np.array([2]),
        "num_classes": 2,
    }
    return CsrGraph(**{**fields, **changes})


def test_a_saved_graph_is_mapped_again(tmp_path) -> None:
    save_graph(graph(), tmp_path / "ring")
    found = open_graph(tmp_path / "ring")
    for name in csr_graph.ARRAYS:
        assert np.array_equal(getattr(found, name), getattr(graph(), name))
    assert isinstance(found.features, np.memmap)
    assert (found.name, found.num_nodes, found.num_features, found.num_classes) == ("ring", 4, 2, 2)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"indices": np.array([1, 2, 9, 0])},
            "a dangling edge: node 2 names node 9 as its neighbour, and nodes are 0 to 3",
        ),
        ({"indices": np.array([1, 1, 3, 0])}, "names node 1 as its own neighbour"),
        ({"indptr": np.array([0, 2, 1, 3, 4])}, "row pointers that do not rise from 0 to its 4 edges"),
        ({"labels": np.full(4, -1)}, "has no labels for its 4 nodes"),
        ({"labels": np.array([0, 1])}, "has no labels for its 4 nodes"),
        ({"labels": np.array([0, 5, 0, -1])}, "has the label 5 and 2 classes"),
        ({"features": np.ones((3, 2), np.float32)}, r"features of shape \(3, 2\) for 4 nodes"),
        ({"features": np.array([[1, 2], [1, np.nan]] * 2, np.float32)}, "has the feature nan at node 1, column 1"),
        ({"train": np.array([], np.int64)}, "has an empty train split"),
        ({"test": np.array([], np.int64)}, "has an empty test split"),
        ({"train": np.array([0, 4])}, "has node 4 in its train split, and nodes are 0 to 3"),
        ({"train": np.array([0, 3])}, "has node 3 without a label in its train split"),
    ],
)
def test_a_bad_graph_gets_a_sentence(changes, sentence) -> None:
    with pytest.raises(InputError, match=sentence):
        check_graph(graph(**changes))


def test_a_graph_larger_than_memory_is_refused(tmp_path, monkeypatch) -> None:
    save_graph(graph(), tmp_path / "ring")
    monkeypatch.setattr(csr_graph.os, "sysconf", lambda _: 8)
    with pytest.raises(InputError, match=r"takes .* and this host has 64 B of memory; give a graph with fewer edges"):
        open_graph(tmp_path / "ring")


def test_features_of_another_length_than_the_manifests_are_refused(tmp_path) -> None:
    save_graph(graph(), tmp_path)
    np.save(tmp_path / "features.npy", np.ones((4, 3), np.float32))
    with pytest.raises(InputError, match=r"has 3 features in its arrays and 2 in graph\.json"):
        open_graph(tmp_path)


def test_a_file_that_changed_is_checked_again(tmp_path) -> None:
    save_graph(graph(), tmp_path)
    open_graph(tmp_path)
    np.save(tmp_path / "indices.npy", np.array([1, 2, 7, 0], np.int32))
    with pytest.raises(InputError, match="a dangling edge"):
        open_graph(tmp_path)


def test_arrays_of_other_types_and_objects_are_refused(tmp_path) -> None:
    save_graph(graph(), tmp_path)
    np.save(tmp_path / "labels.npy", np.array([0, 1, 0, -1], np.int32))
    with pytest.raises(InputError, match="holds int32 in 1 dimensions; give int64 in 1"):
        open_graph(tmp_path)
    np.save(tmp_path / "labels.npy", np.array([{}, 1], object), allow_pickle=True)
    with pytest.raises(InputError, match=r"cannot read .*labels.npy: it is no array that can be mapped"):
        open_graph(tmp_path)


def test_a_folder_without_a_graph_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match=r"holds no graph: it has no graph.json"):
        open_graph(tmp_path)
