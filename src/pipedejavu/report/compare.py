"""Compares two timelines of one program: predicted against measured time, by worker and kind of action."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from pipedejavu.facts import Span, Timeline
from pipedejavu.report.label import Label, parse_label


class Comparison(NamedTuple):
    """Total time of all actions of one kind on one worker."""

    worker: int
    kind: str
    num_actions: int
    predicted_s: float
    measured_s: float
    waited_s: float = 0.0
    """Measured time of collectives before their last member arrived; `measured_s` leaves it out."""

    @property
    def ratio(self) -> float:
        """Measured over predicted time."""
        return self.measured_s / self.predicted_s if self.predicted_s else float("inf") if self.measured_s else 1.0


def compare(predicted: Timeline, measured: Timeline) -> list[Comparison]:
    """Joins two timelines by worker and kind; an action that only one of them has counts as zero in the other.

    Receives are left out: they last as long as their worker waits, which is not a cost. A collective ends for all its
    members at once, so the member with the shortest span is the last to arrive, and the others have waited for it.
    """
    times: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    counts: dict[tuple[int, str], int] = defaultdict(int)
    for column, timeline in enumerate((predicted, measured)):
        for span, label, waited_s in _with_waits(timeline.spans()):
            key = (span.worker, label.kind)
            if key[1] not in ("RECV", "DROP"):
                times[key][column] += span.end_s - span.start_s - waited_s
                times[key][2] += column * waited_s
                counts[key] += column
    return [Comparison(*key, counts[key], *row) for key, row in sorted(times.items())]


def _with_waits(spans: Iterable[Span]) -> list[tuple[Span, Label, float]]:
    """Returns spans with their labels, and the time for which each waits for the other members of its collective."""
    joined: dict[tuple[object, ...], list[float]] = defaultdict(list)
    counts: dict[tuple[object, ...], int] = defaultdict(int)
    keyed = []
    for span in spans:
        label, key = parse_label(span.action), None
        if label.kind in ("REDUCE", "GATHER"):
            occurrence = (span.worker, label._replace(replica=None))
            key = (label._replace(replica=None), counts[occurrence])
            counts[occurrence] += 1
            joined[key].append(span.end_s - span.start_s)
        keyed.append((span, label, key))
    return [(span, label, span.end_s - span.start_s - min(joined[key]) if key else 0.0) for span, label, key in keyed]
