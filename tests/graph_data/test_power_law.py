"""Power-law graphs: deterministic, of the size asked, and with classes that neighbours reveal."""

import numpy as np
import pytest

from pipedejavu.facts import InputError
from pipedejavu.graph_data import csr_graph, open_power_law


def test_a_graph_depends_on_its_size_and_seed_alone(tmp_path) -> None:
    found = [open_power_law(5_000, tmp_path / str(n), seed=seed, num_features=3) for n, seed in enumerate((1, 1, 2))]
    for name in csr_graph.ARRAYS:
        assert np.array_equal(getattr(found[0], name), getattr(found[1], name))
    assert not np.array_equal(found[0].features, found[2].features)


def test_its_degrees_follow_a_power_law_and_its_edges_their_classes(tmp_path) -> None:
    graph = open_power_law(50_000, tmp_path, num_features=2)
    degrees = np.diff(graph.indptr)
    assert abs(len(graph.indices) / 50_000 - 1) < 0.2
    assert degrees.max() > 10 * degrees.mean()
    rows = np.repeat(np.arange(graph.num_nodes), degrees)
    # Six in ten neighbours have the node's class, and a sixteenth of the others by chance.
    assert abs((graph.labels[rows] == graph.labels[graph.indices]).mean() - (0.6 + 0.4 / 16)) < 0.02
    assert (np.bincount(graph.labels) > 0).all()
    assert not {*graph.train.tolist()} & {*graph.test.tolist()}


def test_an_existing_graph_is_opened_and_not_made_again(tmp_path) -> None:
    first = open_power_law(5_000, tmp_path, num_features=3)
    before = (tmp_path / first.name / "features.npy").stat().st_mtime_ns
    open_power_law(5_000, tmp_path, num_features=3)
    assert (tmp_path / first.name / "features.npy").stat().st_mtime_ns == before


def test_other_sizes_are_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="takes 1000 to 200000000 edges, found 10"):
        open_power_law(10, tmp_path)
