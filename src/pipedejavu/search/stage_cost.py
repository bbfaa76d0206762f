"""The cheap cost of stages and drafts: closed forms that the searchers minimise; the simulator has the last word.

An update of a pipeline takes Σ(f + 2c) + max z over its stages: f is what a stage takes for a microbatch, c what its
output takes to the next one. z is what a stage adds once the first microbatch is through, (m − 1)·max(f, c) for its m
microbatches, and what follows its last backward. Under 1F1B a stage holds l microbatches at most, so l of them take no
less than one's way to the last stage and back. So the cost is a sum and a maximum over stages, and the maximum grows
with the sum behind it: that is what makes it exact to minimise. All is worked out for arrays of stages at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipedejavu.facts import Cost
from pipedejavu.search.candidate_plan import Array, Mode, PlanningProblem, bucket_bytes
from pipedejavu.search.slot import ScheduledSlot, StageSlot

Positions = NDArray[np.intp]
Index = Positions | int

MEETING = 0.5
"""Of other stages' transfers on a wire, the part that one meets and shares it with."""
_PARTS = "forward", "backward", "recompute"


class StageCost(NamedTuple):
    """What stages cost on one seat, for arrays of them."""

    slot: ScheduledSlot
    sum_s: Array
    """What each adds to an update: one microbatch there, and to the next stage and back."""
    slowest_s: Array
    """What each further microbatch takes at least."""
    after_s: Array
    """What follows the last backward."""
    device_bytes: Array
    host_bytes: Array

    def bound_s(self, behind_s: Array | float) -> Array:
        """Returns what each adds once its first microbatch is through, with a way to the end and back of `behind_s`."""
        return np.asarray(bound_s(self.slot, self.sum_s, self.slowest_s, self.after_s, behind_s, np.maximum))

    @property
    def total_s(self) -> Array:
        """What each adds to the time of an update."""
        return np.zeros_like(self.sum_s) if self.slot.is_stale else self.sum_s


def bound_s(slot: ScheduledSlot, sum_s: Any, slowest_s: Any, after_s: Any, behind_s: Any, largest: Any = max) -> Any:
    """Returns what stages add once their first microbatch is through, as numbers or, with `np.maximum`, as arrays."""
    share, live = slot.share, slot.live
    if slot.is_stale:
        return share * largest(slowest_s, (sum_s + behind_s) / live) + after_s
    rounds, rest = divmod(share - 1, live)
    around = largest(live * slowest_s, sum_s + behind_s) if rounds else 0.0
    return rest * slowest_s + rounds * around + after_s


@dataclass(frozen=True)
class Sums:
    """Arrays of stages: what their units hold and take, added up."""

    count: Array
    forward: Array
    backward: Array
    recompute: Array
    update: Array
    """On the device; of what rests on the host, `host_update`."""
    host_update: Array
    weights: Array
    gradients: Array
    optimizer: Array
    hosted_weights: Array
    hosted_gradients: Array
    hosted_optimizer: Array
    saved: Array
    checkpoints: Array
    """What stays of activations where some are computed again."""
    most_saved: Array
    most_weights: Array
    most_checkpoint: Array
    enters: Array
    leaves: Array
    all_weights: float
    all_gradients: float
    all_host_update: float
    """Of the whole model."""


class StageCosts:
    """Costs of one scene's stages for microbatches of one size."""

    def __init__(self, problem: PlanningProblem, samples: int):
        self.problem, self.samples, self.profile = problem, samples, problem.profile
        units = self.profile.units
        self.num_units = len(units)
        self.weights = _totals([u.parameter_bytes for u in units])
        self.gradients = _totals([u.gradient_bytes for u in units])
        self.optimizer = _totals([u.optimizer_bytes for u in units])
        self.saved = _totals([u.activation_bytes * samples for u in units])
        self.cut = cut_bytes(problem) * samples
        self.checkpoints = _totals(self.cut[:-1])
        self.most_saved = _most([u.activation_bytes * samples for u in units])
        self.most_weights = _most([u.parameter_bytes for u in units])
        self.most_checkpoint = _most([*self.cut[:-1]])
        self.state_bytes = tuple(float(t[-1]) for t in (self.weights, self.gradients, self.optimizer))
        """Of all weights, gradients and optimizer state."""
        self._times: dict[tuple[str, object], tuple[Array, ...]] = {}
        self._again: dict[tuple[str, ...], _Again] = {}

    def times(self, kind: str) -> tuple[Array, ...]:
        """Returns running totals over units of forward, backward, recompute and update on a kind of device."""
        return self._totals(kind, Cost.at)

    def works(self, kind: str) -> tuple[Array, ...]:
        """Returns the same where the host has issued everything before."""
        return self._totals(kind, Cost.work_s)

    def _totals(self, kind: str, read: Callable[[Cost, float], float]) -> tuple[Array, ...]:
        if (kind, read) not in self._times:
            rows = [self.profile.time(unit, kind) for unit in self.profile.units]
            parts = [[read(getattr(row, part), self.samples) for row in rows] for part in _PARTS]
            self._times[kind, read] = tuple(map(_totals, (*parts, [row.update_s for row in rows])))
        return self._times[kind, read]

    def stage(self, start: Index, end: Index, slot: ScheduledSlot, mode: Mode, sums: Sums | None = None) -> StageCost:
        """Returns the costs of stages with the units from `start` to `end`, each on `seat`; `sums` are theirs there."""
        found = sums or self.add_up(start, end, slot.place, mode)
        if mode.recomputes:
            found = self._recomputed(found, start, end, slot, mode)
        forward, back = found.forward, found.backward
        if mode.recomputes:
            back = back + found.recompute
        if mode.uses_host:
            moved = found.weights * (mode.state == "window")
            if mode.activations == "host":
                moved = moved + (found.checkpoints if mode.recomputes else found.saved)
            forward, back = (np.maximum(part, moved * slot.place.host.byte_s) for part in (forward, back))
        if slot.zero == 3 and slot.place.is_alone:  # weights come for each use, ahead of it
            gathered = slot.place.ring.turn(len(slot.place.group), found.weights, found.count)
            forward, back = (np.maximum(part, gathered) for part in (forward, back))
        sent_bytes = found.leaves * (1 + MEETING * slot.place.meets * (1 - 1 / slot.share))
        work, sent = forward + back, slot.place.next.time(sent_bytes)
        after = _after(found, back, slot, mode)
        device, host = _memory(found, slot, mode)
        return StageCost(slot, work + 2 * sent, np.maximum(work, sent), after, device, host)

    def add_up(self, start: Index, end: Index, place: StageSlot, mode: Mode) -> Sums:
        """Returns what the units of stages hold and take on devices such as a place has, before any recompute."""

        def of(totals: Array) -> Array:
            return np.asarray(totals[end] - totals[start])

        def most(table: Array) -> Array:
            return np.asarray(table[start, end])

        rest = end if mode.state == "device" else np.minimum(np.asarray(start) + mode.device_pieces, end)

        def hosted(totals: Array) -> Array:
            return np.asarray(totals[end] - totals[rest])

        rows = [[of(row) for row in self.times(kind)] for kind in place.kinds]
        forward, backward, _, update = (np.asarray(np.max(row, axis=0)) for row in zip(*rows, strict=True))
        if mode.state != "device":
            updates = [self.times(kind)[3] for kind in place.kinds]
            update = np.asarray(np.max([total[rest] - total[start] for total in updates], axis=0))
        host_updates = self.times(place.cpu)[3] if mode.state != "device" else np.zeros(self.num_units + 1)
        return Sums(
            count=np.maximum(np.asarray(end) - np.asarray(start), 1).astype(float),
            forward=forward,
            backward=backward,
            recompute=np.zeros_like(forward),
            update=update,
            host_update=hosted(host_updates),
            weights=of(self.weights),
            gradients=of(self.gradients),
            optimizer=of(self.optimizer),
            hosted_weights=hosted(self.weights),
            hosted_gradients=hosted(self.gradients),
            hosted_optimizer=hosted(self.optimizer),
            saved=of(self.saved),
            checkpoints=np.zeros_like(forward),
            most_saved=most(self.most_saved),
            most_weights=most(self.most_weights),
            most_checkpoint=most(self.most_checkpoint),
            enters=np.asarray(self.cut[start]),
            leaves=np.asarray(self.cut[end]),
            all_weights=self.state_bytes[0],
            all_gradients=self.state_bytes[1],
            all_host_update=float(host_updates[-1]),
        )

    def _recomputed(self, found: Sums, start: Index, end: Index, slot: ScheduledSlot, mode: Mode) -> Sums:
        """Returns stages of which as few units are computed again as make them fit, the cheapest first."""
        again = self.again(slot.place.kinds)
        count = self._num_again(found, start, end, slot, mode)
        return replace(
            found,
            recompute=again.time[count, end] - again.time[count, start],
            checkpoints=again.kept[count, end] - again.kept[count, start],
            most_saved=np.where(count > 0, found.most_saved, 0.0),
        )

    def _num_again(self, found: Sums, start: Index, end: Index, slot: ScheduledSlot, mode: Mode) -> Positions:
        """Returns how many units of the order of `again` each stage computes again, counted over the whole model."""
        kept = self.again(slot.place.kinds).kept
        if mode.activations == "host":  # what stays does not stay here
            return np.full_like(np.asarray(end), len(kept) - 1)
        without, _ = _memory(replace(found, most_saved=np.zeros_like(found.saved)), slot, mode)
        room, start, end = slot.place.room_bytes - without, np.asarray(start), np.asarray(end)
        count = np.zeros_like(end)
        is_short = slot.live * found.saved > room
        count[is_short] = _fewest(kept, slot.live, start[is_short], end[is_short], (room - found.most_saved)[is_short])
        return count

    def again(self, kinds: tuple[str, ...]) -> "_Again":
        """Returns what computing more and more units again saves and costs, on the slowest of some kinds."""
        if kinds not in self._again:
            time = np.max([np.diff(self.times(kind)[2]) for kind in kinds], axis=0)
            saved, input_ = np.diff(self.saved), self.cut[:-1]
            freed = saved - input_
            order = sorted(np.flatnonzero(freed > 0), key=lambda u: (time[u] / freed[u], u))
            times, kept = [np.zeros_like(time)], [saved]
            for unit in order:
                here = np.arange(len(time)) == unit
                times.append(np.where(here, time, times[-1]))
                kept.append(np.where(here, input_, kept[-1]))
            tables = (np.stack([_totals(row) for row in rows]) for rows in (times, kept))
            self._again[kinds] = _Again(tuple(map(int, order)), *tables)
        return self._again[kinds]

    def recomputed_units(self, start: int, end: int, slot: ScheduledSlot, mode: Mode) -> tuple[int, ...]:
        """Returns the units of one stage that are computed again."""
        if not mode.recomputes:
            return ()
        found = self.add_up(start, end, slot.place, mode)
        count = int(self._num_again(found, start, end, slot, mode))
        order = self.again(slot.place.kinds).order
        return tuple(sorted(u for u in order[:count] if start <= u < end))


class _Again(NamedTuple):
    """Units in the order in which they are computed again, and running totals for the first 0, 1, 2, … of them."""

    order: tuple[int, ...]
    time: Array
    kept: Array


def _fewest(kept: Array, live: int, start: Positions, end: Positions, room: Array) -> Positions:
    """Returns how many units stages compute again at least to have room for what is kept; all where that is too few."""
    count = np.full_like(end, len(kept) - 1)
    is_enough = live * (kept[-1, end] - kept[-1, start]) <= room
    start, end, room, high = start[is_enough], end[is_enough], room[is_enough], count[is_enough]
    low = np.minimum(1, high)
    while np.any(low < high):
        middle = (low + high) // 2
        fits = live * (kept[middle, end] - kept[middle, start]) <= room
        low, high = np.where(fits, low, np.minimum(middle + 1, high)), np.where(fits, middle, high)
    count[is_enough] = low
    return count


def _after(found: Sums, back: Array, slot: ScheduledSlot, mode: Mode) -> Array:
    """Returns what follows the last backward: reductions, and the update where it rests."""
    size = len(slot.place.group)
    after = found.update / (size if slot.zero else 1)
    if mode.state != "device":
        out, into = (part * slot.place.host.byte_s for part in (found.hosted_gradients, found.hosted_weights))
        if mode.state == "window":
            into = np.zeros_like(into)
        # A CPU updates for all at once, and for the largest stage of a pipeline until all is through.
        update = np.minimum(slot.place.cpu_crowd * found.host_update, found.all_host_update) * slot.place.updaters
        longest = np.maximum(np.maximum(update, out), into)
        after = after + np.maximum(longest - back, 0.0) + (update + out + into) / found.count
    if size == 1:
        return np.asarray(after)
    # Of rings that share a wire the smaller end first, and the largest when all is through.
    ring, crowd = slot.place.ring, slot.place.crowd
    messages = _messages(found, slot, mode)
    gradients = np.minimum(crowd * found.gradients, found.all_gradients)
    reduced = (1 if slot.zero else 2) * ring.turn(size, gradients, messages)
    if slot.zero in (1, 2) or (slot.zero == 3 and not slot.place.is_alone):  # new weights are gathered, or the batch's
        after = after + ring.turn(size, np.minimum(crowd * found.weights, found.all_weights), messages)
    if slot.place.is_alone:
        reduced = np.maximum(reduced - back * (1 - 1 / found.count), reduced / found.count)
    return np.asarray(after + reduced)


def _messages(found: Sums, slot: ScheduledSlot, mode: Mode) -> Array:
    """Returns in how many collectives a stage's gradients are added up."""
    if mode.goes_by_pieces:
        return found.count
    if not slot.place.is_alone:
        return np.ones_like(found.count)
    return np.minimum(found.count, np.ceil(found.gradients / bucket_bytes(found.all_gradients)))


def _memory(found: Sums, slot: ScheduledSlot, mode: Mode) -> tuple[Array, Array]:
    """Returns the highest need of each device of a seat, and of its host for it."""
    size = len(slot.place.group)
    host = np.zeros_like(found.weights)
    kept, piece = (found.checkpoints, found.most_checkpoint) if mode.recomputes else (found.saved, found.most_saved)
    held = slot.live * kept
    if mode.activations == "host":
        host, held = host + held, np.minimum(held, 3 * piece)
    # What enters and leaves; of a pipeline one more of each, as neighbours run ahead; and between pieces.
    held = held + (found.enters + found.leaves) * (1 if slot.place.is_alone else 2)
    if not mode.is_plain or (slot.place.is_alone and size > 1):
        held = held + 2 * found.most_checkpoint
    if mode.recomputes:
        held = held + found.most_saved
    optimizer = found.optimizer / (size if slot.zero else 1)
    weights = found.weights * (2 if slot.is_stale else 1)
    if slot.zero == 3:
        weights = weights / size + (3 * found.most_weights if slot.place.is_alone else weights)
    elif mode.state != "device":
        host = host + found.hosted_weights + found.hosted_gradients + found.hosted_optimizer
        optimizer = optimizer - found.hosted_optimizer
        weights = weights if mode.state == "host" else 3 * found.most_weights
    return np.asarray(weights + found.gradients + optimizer + held), np.asarray(host)


def cut_bytes(problem: PlanningProblem) -> Array:
    """Returns the bytes of a sample that pass each border between units, each unit's output once."""
    profile = problem.profile
    passing: list[dict[int, float]] = [{} for _ in range(len(profile.units) + 1)]
    for source, target, size in profile.links:
        for outputs in passing[source + 1 : target + 1]:
            outputs[source] = max(size, outputs.get(source, 0.0))
    return np.array([sum(outputs.values()) for outputs in passing], dtype=float)


def _totals(values: "list[float] | list[int] | Array") -> Array:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=float))])


def _most(values: "list[float] | list[int]") -> Array:
    """Returns the largest of the values from `start` to `end`, as a matrix."""
    count = len(values)
    found = np.zeros((count + 1, count + 1))
    for start in range(count):
        found[start, start + 1 :] = np.maximum.accumulate(np.asarray(values[start:], dtype=float))
    return found
