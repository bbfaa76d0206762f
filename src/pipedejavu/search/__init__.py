"""Search: the best plans for a model on a machine, with reasons; never imports torch."""

from pipedejavu.search.option import Options, Progress
from pipedejavu.search.result import Candidate, MemoryNeed, SearchResult
from pipedejavu.search.search import search

__all__ = ["Candidate", "MemoryNeed", "Options", "Progress", "SearchResult", "search"]
