"""Programs of one GPU and its host, run by the machinery of HybridAdamW instead of one action at a time."""

from pipedejavu.one_device.start import start_rank, start_threads
from pipedejavu.one_device.suitability import why_by_actions

__all__ = [
    "start_rank",
    "start_threads",
    "why_by_actions",
]
