"""Options of a cluster's schedule, checked against the policies, allocations and packings that exist."""

from typing import Self

from pydantic import Field, model_validator

from pipedejavu.cluster.allocation import ALLOCATIONS
from pipedejavu.cluster.policy import POLICIES
from pipedejavu.cluster.server_pool import PACKINGS
from pipedejavu.facts import Record, nearest
from pipedejavu.facts.quantity import BytesPerSecond, Seconds


class ScheduleOptions(Record):
    """How a cluster is scheduled, and what it costs to move jobs."""

    policy: str = "fifo"
    allocation: str = "proportional"
    packing: str = "best"
    backfill: bool = False
    """Whether a job that fits may pass jobs before it that do not; preemptive policies always let it."""
    round_s: Seconds = Field(default=300.0, gt=0)
    """Time between the ticks at which running jobs are preempted, tuned and resized."""
    start_s: Seconds = 10.0
    """Time to start a job's processes."""
    disk_bytes_per_s: BytesPerSecond = Field(default=1e9, gt=0)
    """Rate at which checkpoints are written and read."""
    rent_start_s: Seconds = 120.0
    """Time until a rented server can be used."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.agreed()

    def disagreements(self) -> list[str]:
        """Returns the names that do not exist."""
        known = {"policy": tuple(POLICIES), "allocation": ALLOCATIONS, "packing": PACKINGS}
        return [
            f"there is no {field} '{getattr(self, field)}'{nearest(getattr(self, field), names)}"
            for field, names in known.items()
            if getattr(self, field) not in names
        ]
