"""Search: the best plans for a model on a machine, with reasons; never imports torch."""

from pipedejavu.search.advice import Advice, Advised, advise, nothing_fits, smallest_change
from pipedejavu.search.correction_choice import GivenUp
from pipedejavu.search.front import leaner_plans
from pipedejavu.search.largest import Largest, find_largest
from pipedejavu.search.rental import Rental, TrainingGoal, compare_rentals
from pipedejavu.search.search import price_of_staleness, search
from pipedejavu.search.search_options import Progress, SearchOptions
from pipedejavu.search.search_result import MemoryNeed, RankedPlan, SearchResult

__all__ = [
    "Advice",
    "Advised",
    "GivenUp",
    "Largest",
    "MemoryNeed",
    "Progress",
    "RankedPlan",
    "Rental",
    "SearchOptions",
    "SearchResult",
    "TrainingGoal",
    "advise",
    "compare_rentals",
    "find_largest",
    "leaner_plans",
    "nothing_fits",
    "price_of_staleness",
    "search",
    "smallest_change",
]
