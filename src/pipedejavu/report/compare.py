"""Compares two timelines of one program: predicted against measured time, by worker and kind of action."""

from collections import defaultdict
from typing import NamedTuple

from pipedejavu.facts import Timeline
from pipedejavu.report.label import parse_label


class Comparison(NamedTuple):
    """Total time of all actions of one kind on one worker."""

    worker: int
    kind: str
    num_actions: int
    predicted_s: float
    measured_s: float

    @property
    def ratio(self) -> float:
        """Measured over predicted time."""
        return self.measured_s / self.predicted_s if self.predicted_s else float("inf") if self.measured_s else 1.0


def compare(predicted: Timeline, measured: Timeline) -> list[Comparison]:
    """Joins two timelines by worker and kind; an action that only one of them has counts as zero in the other.

    Receives are left out: they last as long as their worker waits, which is not a cost.
    """
    times: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    counts: dict[tuple[int, str], int] = defaultdict(int)
    for column, timeline in enumerate((predicted, measured)):
        for span in timeline.spans():
            key = (span.worker, parse_label(span.action).kind)
            if key[1] not in ("RECV", "DROP"):
                times[key][column] += span.end_s - span.start_s
                counts[key] += column
    return [Comparison(*key, counts[key], *both) for key, both in sorted(times.items())]
