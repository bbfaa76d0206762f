"""The health of a run's workers: failures, heartbeats, and a watchdog for hanging lanes."""

from pipedejavu.health.failure import WorkerError

__all__ = [
    "WorkerError",
]
