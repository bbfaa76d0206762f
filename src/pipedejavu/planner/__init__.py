"""Planning for this machine: worker hosts, measured profiles, the search, and planning again while training."""

from pipedejavu.planner.worker_host import num_gpus

__all__ = [
    "num_gpus",
]
