"""Graphs in host memory, their folders and generators, and the sampling of neighbours; knows no model and no torch."""

from pipedejavu.graph_data.code_graph import make_code_graph, open_code_graph
from pipedejavu.graph_data.csr_graph import CsrGraph, check_graph, graph_cache, open_graph, save_graph
from pipedejavu.graph_data.neighbour_sampler import ALL, Block, NeighbourSampler, Rows, check_fanouts, parse_fanouts
from pipedejavu.graph_data.power_law import open_power_law
from pipedejavu.graph_data.published_graph import open_published

__all__ = [
    "ALL",
    "Block",
    "CsrGraph",
    "NeighbourSampler",
    "Rows",
    "check_fanouts",
    "check_graph",
    "graph_cache",
    "make_code_graph",
    "open_code_graph",
    "open_graph",
    "open_power_law",
    "open_published",
    "parse_fanouts",
    "save_graph",
]
