"""Measurements of a machine: each figure with its spread, and when and with which software it was taken."""

from typing import Literal

from pydantic import Field

from pipedejavu.facts.quantity import Seconds
from pipedejavu.facts.record import Record

MEASURE_S = 20.0
"""Seconds that measuring a model may take, by default; what is left out is estimated."""


class Measurement(Record):
    """One measured figure, and how far a repeated measurement may differ from it."""

    subject: str
    """A device, a pair of devices such as 'cpu>gpu0', or 'disk'."""
    what: str
    """The quantity: 'matrix', 'memory', 'update', 'copy', …"""
    setting: str = ""
    """Conditions: shape, dtype, threads, message size."""
    unit: Literal["B", "s", "B/s", "FLOP/s", "1/s", "×"]
    value: float
    """For rates and times, the upper quartile of speed over the rounds; for sizes and ratios, the median."""
    spread: float = Field(default=0.0, ge=0)
    """Another survey's value is expected within ± this of the value."""
    rounds: int = Field(default=1, ge=1)

    @property
    def name(self) -> str:
        """Subject, quantity and setting in one text."""
        return " ".join(part for part in (self.subject, self.what, self.setting) if part)


class Survey(Record):
    """When and how a machine was measured."""

    date: str
    """End of the survey, as ISO 8601 with a time zone."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of the software and drivers involved."""
    time_s: Seconds
    measurements: tuple[Measurement, ...] = ()
    unknown: tuple[str, ...] = ()
    """What could not be measured, and why."""
    disturbance: str = ""
    """How other processes disturbed the survey; empty if they hardly did."""
