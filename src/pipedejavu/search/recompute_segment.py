"""StageRecompute segments: runs of units that keep only their input and are recomputed together, one run at a time.

A stage with several microbatches in flight keeps the inputs of its recomputed segments once per microbatch, and what
one segment saves once. Long segments keep little and save much at a time, short ones the reverse, so the model is
divided in several ways: into one segment, into segments of a half, a quarter, … of all saved bytes, and into units. In
each, segments are recomputed in the order of time per byte freed, as few as make a stage fit, and each stage takes the
way that costs it least time. A stage that begins or ends inside a segment has a part of it.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipedejavu.search.candidate_plan import Array
from pipedejavu.search.stage_sums import Positions, prefix_sums, range_maxima

MOST_DIVISIONS = 6
"""Divisions of a model between one segment and single units at most."""


class Segments(NamedTuple):
    """One division of the model into segments, with sums for each number of recomputed segments."""

    least_bytes: float
    """Saved bytes up to which a stage is no longer than a segment, so that another division serves it as well."""
    first: Positions
    """The first unit of each unit's segment."""
    rank: Positions
    """For each unit, how many segments are recomputed before its own; the largest number if it never is."""
    time: Array
    """Prefix sums over units of the recompute time, by number of segments."""
    kept: Array
    """Prefix sums of the bytes that stay."""
    inputs: Array
    """For each unit inside a recomputed segment, the bytes of its input, which stay if a stage begins there."""
    pieces: Array
    """Prefix sums of the boundaries at which recompute begins or ends."""
    extra: Array
    """The bytes that a backward adds to what stays, by first unit and end of a stage: what one segment saves, and the
    gradients of its input and output, less what the microbatch no longer keeps of the segments after it, and less the
    gradients of the stage's input and output, which are counted for any stage."""

    @property
    def most(self) -> int:
        """The number of segments that may be recomputed."""
        return len(self.kept) - 1

    def kept_bytes(self, count: Positions | int, start: Positions, end: Positions) -> Array:
        """Returns the bytes per microbatch that stages keep if so many segments are recomputed."""
        return np.asarray(self.kept[count, end] - self.kept[count, start] + self.inputs[count, start])

    def num_pieces(self, count: Positions, start: Positions, end: Positions) -> Array:
        """Returns the runs of units that stages are divided into."""
        return np.asarray(1 + self.pieces[count, end] - self.pieces[count, start + 1])

    def fewest(self, live: int, start: Positions, end: Positions, limit_bytes: Array) -> Positions:
        """Returns the least number of recomputed segments with which stages fit; all of them if that is not enough."""
        limit_bytes = limit_bytes - self.extra[start, end]
        count = np.full_like(end, self.most)
        is_enough = live * self.kept_bytes(self.most, start, end) <= limit_bytes
        start, end, limit_bytes, high = start[is_enough], end[is_enough], limit_bytes[is_enough], count[is_enough]
        low = np.minimum(1, high)
        while np.any(low < high):
            middle = (low + high) // 2
            fits = live * self.kept_bytes(middle, start, end) <= limit_bytes
            low, high = np.where(fits, low, np.minimum(middle + 1, high)), np.where(fits, middle, high)
        count[is_enough] = low
        return count


class StageRecompute(NamedTuple):
    """What one stage recomputes."""

    units: tuple[int, ...] = ()
    checkpoints: tuple[int, ...] = ()
    """Units inside the stage at which a run of recomputed or kept units begins."""


class RecomputeChoice(NamedTuple):
    """For an array of stages, the division of each and how many of its segments are recomputed."""

    division: Positions
    """Index of the division."""
    segments: Positions
    """How many of its segments are recomputed; 0 if a stage fits as it is."""

    def of(self, divisions: "tuple[Segments, ...]", start: int, end: int) -> StageRecompute:
        """Returns what a single stage recomputes."""
        chosen, count = divisions[int(self.division)], int(self.segments)
        first = np.maximum(chosen.first[start:end], start).tolist()
        again = (chosen.rank[start:end] < count).tolist()
        pairs = enumerate(pairwise(zip(first, again, strict=True)), start + 1)
        marks = (unit for unit, (one, two) in pairs if one[0] != two[0] and (one[1] or two[1]))
        return StageRecompute(tuple(u for u, is_again in enumerate(again, start) if is_again), tuple(marks))


def divide(time: Array, saved: Array, cut: Array, ratio: int = 2) -> tuple[Segments, ...]:
    """Returns the divisions of a model, the longest segments first and single units last.

    `time` and `saved` are of each unit, `cut` are the bytes that cross each boundary. Segments of one division save at
    most `ratio` times as much as those of the next.
    """
    total, largest, divisions = float(saved.sum()), float(saved.max(initial=0.0)), list[tuple[float, Positions]]()
    divisions.append((0.0, np.zeros(len(saved), dtype=np.intp)))
    limit = total / ratio
    while limit > largest and len(divisions) <= MOST_DIVISIONS:
        divisions.append((limit, _first_units(saved, cut, limit)))
        limit /= ratio
    divisions.append((0.0, np.arange(len(saved))))
    return tuple(_segments(least, first, time, saved, cut) for least, first in divisions)


def units_only(time: Array, saved: Array, cut: Array) -> Segments:
    """Returns the division into single units, each of which is a piece, recomputed or not."""
    return _segments(0.0, np.arange(len(saved)), time, saved, cut)._replace(extra=range_maxima(saved.tolist()))


def _first_units(saved: Array, cut: Array, limit_bytes: float) -> Positions:
    """Returns the segments of at most `limit_bytes` whose inputs are smallest in sum, as their first units."""
    totals, count = prefix_sums(saved), len(saved)
    best, begins = np.zeros(count + 1), np.zeros(count + 1, dtype=np.intp)
    earliest = np.searchsorted(totals, totals - limit_bytes * (1 + 1e-12))
    for end in range(1, count + 1):
        low = min(int(earliest[end]), end - 1)
        sums = best[low:end] + cut[low:end]
        at = int(sums.argmin())
        best[end], begins[end] = sums[at], low + at
    first, end = np.zeros(count, dtype=np.intp), count
    while end:
        first[begins[end] : end] = begins[end]
        end = int(begins[end])
    return first


def _segments(least_bytes: float, first: Positions, time: Array, saved: Array, cut: Array) -> Segments:
    """Returns a division with its tables."""
    units, begins = np.arange(len(first)), np.unique(first)
    number = np.searchsorted(begins, first)
    freed = np.bincount(number, saved) - cut[begins]
    each_s = np.bincount(number, time)
    worth = [segment for segment in range(len(begins)) if freed[segment] > 0]
    order = sorted(worth, key=lambda segment: (each_s[segment] / freed[segment], segment))
    ranks = np.full(len(begins), len(order))
    ranks[order] = np.arange(len(order))
    rank = ranks[number]
    again = rank < np.arange(len(order) + 1)[:, None]
    opens = first == units
    inputs = cut[:-1]
    before = np.hstack([again[:, :1], again[:, :-1]])
    return Segments(
        least_bytes=least_bytes,
        first=first,
        rank=rank,
        time=_row_sums(np.where(again, time, 0.0)),
        kept=_row_sums(np.where(again, np.where(opens, inputs, 0.0), saved)),
        inputs=np.hstack([np.where(again & ~opens, inputs, 0.0), np.zeros((len(again), 1))]),
        pieces=_row_sums(np.where(opens & (again | before), 1.0, 0.0)),
        extra=_extra(first, saved, cut),
    )


def _row_sums(rows: Array) -> Array:
    return np.hstack([np.zeros((len(rows), 1)), np.cumsum(rows, axis=1)])


def _extra(first: Positions, saved: Array, cut: Array) -> Array:
    """Returns the table `Segments.extra`; of later segments it takes the lesser of what they save and their input."""
    totals, count = prefix_sums(saved), len(saved)
    ends = np.flatnonzero(np.append(first[1:] != first[:-1], True)) + 1
    begins = first[ends - 1]
    kept = np.zeros(count + 1)
    kept[ends] = np.minimum(cut[begins], totals[ends] - totals[begins])
    kept = np.cumsum(kept)
    is_end = np.isin(np.arange(count + 1), ends)
    extra = np.zeros((count + 1, count + 1))
    for start in range(count):
        end = np.arange(start + 1, count + 1)
        begin = np.maximum(first[end - 1], start)
        last = totals[end] - totals[begin] + cut[begin] + cut[end]
        followed = np.where(is_end[end], last + kept[end], -np.inf)
        before = np.concatenate([[-np.inf], np.maximum.accumulate(followed)[:-1]])
        extra[start, start + 1 :] = np.maximum(last, before - kept[end]) - cut[start] - cut[end]
    return extra
