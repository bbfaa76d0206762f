"""Analysis of programs before they run: dependency graph, liveness, sizes and verification."""

from pipedejavu.analysis.graph import Graph, build_graph
from pipedejavu.analysis.verify import verify

__all__ = [
    "Graph",
    "build_graph",
    "verify",
]
