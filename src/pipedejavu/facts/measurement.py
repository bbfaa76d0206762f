"""What was measured of a machine: each figure with its spread, and when and with what it was measured."""

from typing import Literal

from pydantic import Field

from pipedejavu.facts.quantity import Seconds
from pipedejavu.facts.record import Record


class Measurement(Record):
    """One figure that was measured, with how far from it the figure of another survey may lie."""

    subject: str
    """A device, a pair of them as 'cpu>gpu0', or 'disk'."""
    what: str
    """What was measured of it: 'matrix', 'memory', 'update', 'copy', …"""
    setting: str = ""
    """Under which circumstances: shape, type, threads, size of a message."""
    unit: Literal["B", "s", "B/s", "FLOP/s", "1/s", "×"]
    value: float
    """What the fastest quarter of the rounds surpasses; of a size or a ratio, the median."""
    spread: float = Field(default=0.0, ge=0)
    """Another survey's value is expected within this of the value, up or down."""
    rounds: int = Field(default=1, ge=1)

    @property
    def name(self) -> str:
        """Returns subject, what and setting in one text."""
        return " ".join(part for part in (self.subject, self.what, self.setting) if part)

    def agrees_with(self, other: "Measurement") -> bool:
        """Tells whether each of two surveys' values lies where the other expects it."""
        return abs(self.value - other.value) <= min(self.spread, other.spread)


class Survey(Record):
    """How a machine was measured."""

    date: str
    """When it ended, as ISO 8601 with the time zone."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Of the software that took part, and of drivers."""
    time_s: Seconds
    measurements: tuple[Measurement, ...] = ()
    unknown: tuple[str, ...] = ()
    """What could not be found out, and why."""
