"""Plans for this machine: hosts of workers, measured profiles, the search, and replanning during a run."""

from pipedejavu.planner.worker_host import num_gpus

__all__ = [
    "num_gpus",
]
