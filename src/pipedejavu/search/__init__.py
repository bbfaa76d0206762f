"""Search: the best plans for a model on a machine, with reasons; never imports torch."""

from pipedejavu.search.advice import Advice, Advised, advise, nothing_fits, smallest_change
from pipedejavu.search.front import leaner_plans
from pipedejavu.search.largest import Largest, find_largest
from pipedejavu.search.option import Options, Progress
from pipedejavu.search.result import Candidate, MemoryNeed, SearchResult
from pipedejavu.search.search import search

__all__ = [
    "Advice",
    "Advised",
    "Candidate",
    "Largest",
    "MemoryNeed",
    "Options",
    "Progress",
    "SearchResult",
    "advise",
    "find_largest",
    "leaner_plans",
    "nothing_fits",
    "search",
    "smallest_change",
]
