"""Sampling of neighbours: native and reference code, and what the result depends on."""

import numpy as np
import pytest

from pipedejavu.facts import InputError
from pipedejavu.graph_data import ALL, CsrGraph, NeighbourSampler, check_fanouts, open_power_law, parse_fanouts
from pipedejavu.graph_data.native_sampler import sampler_library


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> CsrGraph:
    return open_power_law(20_000, tmp_path_factory.mktemp("graphs"), num_features=7)


def everything(sampler: NeighbourSampler, fanouts: tuple[int, int], step: int) -> list[np.ndarray]:
    nodes = sampler.graph.train[:150]
    rows = sampler.rows(nodes, fanouts[0], step, 0)
    block = sampler.block(nodes, rows)
    outer = sampler.rows(block.nodes, fanouts[1], step, 1)
    width = sampler.graph.num_features
    gathered, mean, weighted = (np.empty((len(block.nodes), width), np.float32) for _ in range(3))
    sampler.gather(block.nodes, gathered)
    sampler.aggregate(outer, None, mean)
    sampler.aggregate(outer, np.linspace(0, 1, len(outer.found)), weighted)
    return [*rows, *block, *outer, gathered, mean, weighted]


@pytest.mark.skipif(sampler_library() is None, reason="the sampler was not compiled")
@pytest.mark.parametrize("fanouts", [(10, 5), (1, 30), (ALL, 2)])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_native_and_reference_code_give_the_same_bits(graph, fanouts, num_threads) -> None:
    native = NeighbourSampler(graph, 7, num_threads=num_threads, is_native=True)
    reference = NeighbourSampler(graph, 7, is_native=False)
    for first, second in zip(everything(native, fanouts, 3), everything(reference, fanouts, 3), strict=True):
        assert first.dtype == second.dtype
        assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("is_native", [False, None])
def test_each_row_has_as_many_neighbours_as_asked_at_different_places(graph, is_native) -> None:
    numbered = CsrGraph(**{**vars(graph), "indices": np.arange(len(graph.indices), dtype=np.int32)})
    nodes = np.arange(numbered.num_nodes)
    rows = NeighbourSampler(numbered, 1, is_native=is_native).rows(nodes, 6, 0, 0)
    degrees = np.diff(numbered.indptr)
    assert (np.diff(rows.indptr) == np.minimum(degrees, 6)).all()
    assert len({*rows.found.tolist()}) == len(rows.found)
    at = np.repeat(nodes, np.diff(rows.indptr))
    assert ((rows.found >= numbered.indptr[at]) & (rows.found < numbered.indptr[at + 1])).all()


def test_every_neighbour_is_drawn_equally_often(graph) -> None:
    node = int(np.flatnonzero(np.diff(graph.indptr) == 12)[0])
    numbered = CsrGraph(**{**vars(graph), "indices": np.arange(len(graph.indices), dtype=np.int32)})
    sampler, counts = NeighbourSampler(numbered, 5), np.zeros(12)
    for step in range(3000):
        found = sampler.rows(np.array([node]), 4, step, 0).found
        counts[found - numbered.indptr[node]] += 1
    # Each is drawn with probability 1/3; 5 standard deviations of a binomial of 3000 draws are 130.
    assert abs(counts - 1000).max() < 130


def test_a_nodes_neighbours_do_not_depend_on_the_batch(graph) -> None:
    sampler = NeighbourSampler(graph, 2)
    whole = sampler.rows(graph.train, 3, 9, 1)
    part = sampler.rows(graph.train[50:60], 3, 9, 1)
    assert (whole.found[whole.indptr[50] : whole.indptr[60]] == part.found).all()
    for other in (sampler.rows(graph.train, 3, 10, 1), sampler.rows(graph.train, 3, 9, 0)):
        assert not np.array_equal(whole.found, other.found)
    assert not np.array_equal(whole.found, NeighbourSampler(graph, 3).rows(graph.train, 3, 9, 1).found)


@pytest.mark.parametrize("is_native", [False, None])
def test_a_target_that_comes_twice_keeps_both_rows(graph, is_native) -> None:
    sampler, nodes = NeighbourSampler(graph, 2, is_native=is_native), graph.train[[3, 4, 3]]
    block = sampler.block(nodes, sampler.rows(nodes, 5, 0, 0))
    assert (block.nodes[:3] == nodes).all()
    assert (block.nodes[block.indices] == sampler.rows(nodes, 5, 0, 0).found).all()
    assert len({*block.nodes[3:].tolist()} - {*nodes.tolist()}) == len(block.nodes) - 3


def test_fan_outs_are_read_and_refused() -> None:
    assert parse_fanouts("10, 5,all") == (10, 5, ALL)
    for text in ("0", "10,0", "ten", "", "10,,5", "-1"):
        with pytest.raises(InputError, match="--fanout is a number of neighbours per layer, such as 10,5"):
            parse_fanouts(text)
    with pytest.raises(InputError, match="the model has 3 layers and --fanout gives 2 numbers"):
        check_fanouts((10, 5), 3)
