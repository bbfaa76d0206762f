"""What is known of a program before it runs: its graph, its live values, their sizes, and whether it is sound."""

from pipedejavu.analysis.graph import Graph, build_graph
from pipedejavu.analysis.verify import verify

__all__ = [
    "Graph",
    "build_graph",
    "verify",
]
