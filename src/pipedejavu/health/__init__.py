"""Whether the workers of a run are alive: failures, heartbeats, and a watchdog for lanes that hang."""

from pipedejavu.health.failure import WorkerError

__all__ = [
    "WorkerError",
]
