"""Reports on recorded runs of HybridAdamW: where state rests, how busy lanes are, prediction against measurement."""

from pipedejavu.hybrid_report.occupancy import Occupancy, occupancy_of
from pipedejavu.hybrid_report.recording import HybridRun, read_run
from pipedejavu.hybrid_report.review import Review, review

__all__ = [
    "HybridRun",
    "Occupancy",
    "Review",
    "occupancy_of",
    "read_run",
    "review",
]
