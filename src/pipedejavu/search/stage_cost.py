"""The estimated cost of stages: closed forms that the searchers minimise; the simulator makes the final ranking.

An update of a pipeline takes Σ(f + 2c) + max z over its stages. f is a stage's time per microbatch, c the transfer of
its output to the next stage. z is what a stage adds after its first microbatch: (m − 1)·max(f, c) for its m
microbatches, then the reductions and the update after its last backward. Under 1F1B a stage holds at most l
microbatches, so l of them take at least one round trip to the last stage and back. The cost is thus a sum and a maximum
over stages, and each z grows with the sum over the later stages: this makes an exact minimum possible. All functions
work on arrays of stages.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from pipedejavu.facts import Cost, Unit
from pipedejavu.program.unit_traffic import parameter_share
from pipedejavu.search.candidate_plan import Array, Mode, PlanningProblem, bucket_bytes
from pipedejavu.search.recompute_segment import RecomputeChoice, Segments, StageRecompute, divide, units_only
from pipedejavu.search.slot import ScheduledSlot, StageSlot
from pipedejavu.search.stage_sums import (
    ActivationSums,
    Index,
    LargestUnit,
    ModelStateBytes,
    Positions,
    StageSums,
    StateSums,
    TimeSums,
    cut_bytes,
    prefix_sums,
    range_maxima,
)

OVERLAP = 0.5
"""The share of other stages' traffic on a wire that a transfer is assumed to overlap with."""
MOST_FINE = 16
"""Devices up to which the lengths of recompute segments are twice one another; above it, four times."""
_PASSES = "forward", "backward", "recompute"


class StageCost(NamedTuple):
    """The cost of an array of stages in one slot."""

    scheduled: ScheduledSlot
    sum_s: Array
    """Time of one microbatch: compute, and the transfer to the next stage and back."""
    slowest_s: Array
    """Least time of each further microbatch."""
    tail_s: Array
    """Time after the last backward: reductions and the update."""
    device_bytes: Array
    host_bytes: Array

    def remaining_s(self, later_s: Array | float) -> Array:
        """Returns the time after the first microbatch (z), if a round trip through the later stages takes `later_s`."""
        return np.asarray(
            remaining_s(self.scheduled, self.sum_s, self.slowest_s, self.tail_s, later_s, maximum=np.maximum)
        )

    @property
    def total_s(self) -> Array:
        """What each stage adds to the sum of an update's time; 0 if the pipeline never drains."""
        return np.zeros_like(self.sum_s) if self.scheduled.is_stale else self.sum_s

    @property
    def fits(self) -> Any:
        """Whether each stage fits the slot's memory and its host's."""
        memory = self.scheduled.slot.memory
        return (self.device_bytes <= memory.device_bytes) & (self.host_bytes <= memory.host_bytes)


def remaining_s(
    scheduled: ScheduledSlot, sum_s: Any, slowest_s: Any, tail_s: Any, later_s: Any, maximum: Any = max
) -> Any:
    """Returns the time that stages add after their first microbatch, for floats or, with `np.maximum`, for arrays."""
    count, live = scheduled.microbatches, scheduled.live
    if scheduled.is_stale:
        return count * maximum(slowest_s, (sum_s + later_s) / live) + tail_s
    rounds, rest = divmod(count - 1, live)
    round_s = maximum(live * slowest_s, sum_s + later_s) if rounds else 0.0
    return rest * slowest_s + rounds * round_s + tail_s


class StageCosts:
    """Costs of the stages of one planning problem, for microbatches of one size."""

    def __init__(self, problem: PlanningProblem, samples: int):
        self.problem, self.samples, self.profile = problem, samples, problem.profile
        units = self.profile.units
        self.num_units = len(units)
        held = [_held_times(problem, unit) for unit in units]
        self.state = StateSums(
            weights=prefix_sums([u.parameter_bytes * times for u, times in zip(units, held, strict=True)]),
            gradients=prefix_sums([u.gradient_bytes * times for u, times in zip(units, held, strict=True)]),
            optimizer=prefix_sums([u.optimizer_bytes * times for u, times in zip(units, held, strict=True)]),
        )
        """Prefix sums over units."""
        self.model = ModelStateBytes(*(float(totals[-1]) for totals in self.state))
        others = 0 if {"sequence", "context"} & {*problem.layouts} else problem.tp_size - 1
        saved = [(u.activation_bytes + others * u.replicated_bytes) * samples for u in units]
        self.saved = prefix_sums(saved)
        """Prefix sums of saved activations."""
        self.cut = cut_bytes(problem) * samples
        """Bytes per microbatch that cross each boundary between units."""
        self._largest = LargestUnit(
            saved=range_maxima(saved),
            weights=range_maxima([u.parameter_bytes * times for u, times in zip(units, held, strict=True)]),
            checkpoint=range_maxima([*self.cut[:-1]]),
        )
        self._buffers = 1 if problem.is_optimistic else 2  # a pipeline holds one more of each, as neighbours run ahead
        self._times: dict[tuple[str, object], tuple[Array, ...]] = {}
        self._segments: dict[tuple[tuple[str, ...], bool], tuple[Segments, ...]] = {}

    def times(self, kind: str) -> tuple[Array, ...]:
        """Returns prefix sums of forward, backward, recompute and update times on a kind of device."""
        return self._prefix_times(kind, Cost.at)

    def works(self, kind: str) -> tuple[Array, ...]:
        """Returns the same without the time that the host takes to issue the work."""
        return self._prefix_times(kind, Cost.work_s)

    def _prefix_times(self, kind: str, read: Callable[[Cost, float], float]) -> tuple[Array, ...]:
        if (kind, read) not in self._times:
            times = [self.profile.time(unit, kind) for unit in self.profile.units]
            passes = [[read(getattr(time, name), self.samples) for time in times] for name in _PASSES]
            self._times[kind, read] = tuple(map(prefix_sums, (*passes, [time.update_s for time in times])))
        return self._times[kind, read]

    def stage(
        self, start: Index, end: Index, scheduled: ScheduledSlot, mode: Mode, sums: StageSums | None = None
    ) -> StageCost:
        """Returns the costs of stages with the units from `start` to `end`; `sums` saves adding them up again."""
        slot, sums = scheduled.slot, sums or self.add_up(start, end, scheduled.slot, mode)
        if mode.recomputes:
            sums = self._recomputed(sums, start, end, scheduled, mode)
        forward, backward = sums.time.forward, sums.time.backward
        if mode.recomputes:
            backward = backward + sums.time.recompute
        if mode.uses_host:
            moved = sums.state.weights * (mode.state == "window")
            if mode.activations == "host":
                moved = moved + (sums.activations.checkpoints if mode.recomputes else sums.activations.saved)
            forward, backward = (np.maximum(part, moved * slot.host.link.byte_s) for part in (forward, backward))
        if scheduled.zero == 3 and slot.is_alone:  # weights are gathered ahead of each use
            gathered = slot.ring.turn(len(slot.group), sums.state.weights, sums.num_units)
            forward, backward = (np.maximum(part, gathered) for part in (forward, backward))
        others = slot.next.contention - 1
        sent_bytes = sums.activations.outputs * (1 + OVERLAP * others * (1 - 1 / scheduled.microbatches))
        work, sent = forward + backward, slot.next.time(sent_bytes)
        tail = _tail(sums, backward, scheduled, mode)
        device, host = _memory(sums, scheduled, mode, self._buffers)
        return StageCost(scheduled, work + 2 * sent, np.maximum(work, sent), tail, device, host)

    def add_up(self, start: Index, end: Index, slot: StageSlot, mode: Mode) -> StageSums:
        """Returns the sums over the units of stages on the devices of a slot, before any recompute."""
        hosted = end if mode.state == "device" else np.minimum(np.asarray(start) + mode.device_pieces, end)
        per_kind = [[totals[end] - totals[start] for totals in self.times(kind)] for kind in slot.kinds]
        forward, backward, _, update = (np.asarray(np.max(row, axis=0)) for row in zip(*per_kind, strict=True))
        if mode.state != "device":
            updates = [self.times(kind)[3] for kind in slot.kinds]
            update = np.asarray(np.max([totals[hosted] - totals[start] for totals in updates], axis=0))
        host_updates = self.times(slot.host.cpu)[3] if mode.state != "device" else np.zeros(self.num_units + 1)
        return StageSums(
            num_units=np.maximum(np.asarray(end) - np.asarray(start), 1).astype(float),
            time=TimeSums(
                forward=forward,
                backward=backward,
                recompute=np.zeros_like(forward),
                update=update,
                host_update=np.asarray(host_updates[end] - host_updates[hosted]),
                model_host_update=float(host_updates[-1]),
            ),
            state=self.state.between(start, end),
            hosted=self.state.between(hosted, end),
            activations=ActivationSums(
                saved=np.asarray(self.saved[end] - self.saved[start]),
                checkpoints=np.zeros_like(forward),
                inputs=np.asarray(self.cut[start]),
                outputs=np.asarray(self.cut[end]),
            ),
            largest=LargestUnit(*(np.asarray(maxima[start, end]) for maxima in self._largest)),
            model=self.model,
        )

    def _recomputed(self, sums: StageSums, start: Index, end: Index, scheduled: ScheduledSlot, mode: Mode) -> StageSums:
        """Returns the sums with as few segments recomputed as make each stage fit, the cheapest first."""
        start, end = np.asarray(start), np.asarray(end)
        segments, choice = self.segments(scheduled.slot.kinds, mode), self._choose(sums, start, end, scheduled, mode)
        columns = [sums.time.recompute, sums.activations.saved, np.zeros_like(sums.largest.saved)]
        is_replicated = scheduled.slot.is_alone and len(scheduled.slot.group) > 1
        has_pieces = mode.goes_by_pieces or (is_replicated and self._buffers > 1)
        again, kept, extra, between, pieces = (
            np.array(column) for column in (*columns, sums.largest.checkpoint * has_pieces, sums.num_units)
        )
        for index, division in enumerate(segments):
            here = (choice.division == index) & (choice.segments > 0)
            if here.any():
                count, first, last = choice.segments[here], start[here], end[here]
                again[here] = division.time[count, last] - division.time[count, first]
                kept[here] = division.kept_bytes(count, first, last)
                extra[here] = division.extra[first, last]
                if not mode.goes_by_pieces:
                    pieces[here], between[here] = division.num_pieces(count, first, last), 0.0
        return sums._replace(
            num_units=pieces,
            time=sums.time._replace(recompute=again),
            activations=sums.activations._replace(checkpoints=kept),
            largest=sums.largest._replace(saved=extra, checkpoint=between),
        )

    def _choose(
        self, sums: StageSums, start: Positions, end: Positions, scheduled: ScheduledSlot, mode: Mode
    ) -> RecomputeChoice:
        """Returns the division of each stage, and how many segments of it are recomputed."""
        segments = self.segments(scheduled.slot.kinds, mode)
        division, count = np.zeros_like(end), np.zeros_like(end)
        if mode.activations == "host":  # what is kept does not take device memory
            return RecomputeChoice(division, np.full_like(end, segments[0].most))
        between = sums.largest.checkpoint * mode.goes_by_pieces
        bare = sums._replace(largest=sums.largest._replace(saved=np.zeros_like(between), checkpoint=between))
        without, _ = _memory(bare, scheduled, mode, self._buffers)
        limit = scheduled.slot.memory.device_bytes - without
        is_short = self._plain_bytes(sums, scheduled, mode) > scheduled.slot.memory.device_bytes
        start, end = start[is_short], end[is_short]
        limit, saved = limit[is_short], sums.activations.saved[is_short]
        chosen, counts = np.zeros_like(end), np.zeros_like(end)
        best_s, least = np.full(end.shape, np.inf), np.full(end.shape, np.inf)
        for index, part in enumerate(segments):
            here = np.flatnonzero(saved > part.least_bytes)
            first, last = start[here], end[here]
            few = part.fewest(scheduled.live, first, last, limit[here])
            need = scheduled.live * part.kept_bytes(few, first, last) + part.extra[first, last]
            time = np.where(need <= limit[here], part.time[few, last] - part.time[few, first], np.inf)
            better = (time < best_s[here]) | (np.isinf(best_s[here]) & (need < least[here]))
            at = here[better]
            chosen[at], counts[at], best_s[at], least[at] = index, few[better], time[better], need[better]
        division[is_short], count[is_short] = chosen, counts
        return RecomputeChoice(division, count)

    def _plain_bytes(self, sums: StageSums, scheduled: ScheduledSlot, mode: Mode) -> Array:
        """Returns the peak memory of stages that recompute nothing."""
        return _memory(sums, scheduled, replace(mode, recomputes=False), self._buffers)[0]

    def segments(self, kinds: tuple[str, ...], mode: Mode) -> tuple[Segments, ...]:
        """Returns the divisions into recompute segments; the slowest of some kinds decides what is cheap.

        A plan whose state is moved or divided by unit recomputes single units.
        """
        key = (kinds, mode.goes_by_pieces)
        if key not in self._segments:
            time = np.max([np.diff(self.times(kind)[2]) for kind in kinds], axis=0)
            sizes = time, np.diff(self.saved), self.cut
            ratio = 2 if len(self.problem.devices) <= MOST_FINE else 4
            self._segments[key] = (units_only(*sizes),) if mode.goes_by_pieces else divide(*sizes, ratio)
        return self._segments[key]

    def recompute(self, start: int, end: int, scheduled: ScheduledSlot, mode: Mode) -> StageRecompute:
        """Returns what one stage recomputes."""
        if not mode.recomputes:
            return StageRecompute()
        sums = self.add_up(start, end, scheduled.slot, mode)
        choice = self._choose(sums, np.asarray(start), np.asarray(end), scheduled, mode)
        return choice.of(self.segments(scheduled.slot.kinds, mode), start, end)


def _held_times(problem: PlanningProblem, unit: Unit) -> float:
    """Returns how often the devices of a group hold each byte of a unit's state: once, but for what none divides."""
    size = problem.tp_size
    share = parameter_share(problem.layouts, size, unit) if size > 1 else 1.0
    return share + (1 - share) * size


def _tail(sums: StageSums, backward: Array, scheduled: ScheduledSlot, mode: Mode) -> Array:
    """Returns the time after the last backward: reductions, and the update on the device or the host."""
    slot, size = scheduled.slot, len(scheduled.slot.group)
    tail = sums.time.update / (size if scheduled.zero else 1)
    if mode.state != "device":
        exposed, last = _host_update(sums, backward, slot, mode)
        tail = tail + exposed + last
    if size == 1:
        return np.asarray(tail)
    # Of rings that share a wire the smallest ends first, and the largest when all gradients are reduced.
    ring, messages = slot.ring, _num_collectives(sums, scheduled, mode)
    gradients = np.minimum(ring.contention * sums.state.gradients, sums.model.gradients)
    reduced = (1 if scheduled.zero else 2) * ring.turn(size, gradients, messages)
    if scheduled.zero in (1, 2) or (scheduled.zero == 3 and not slot.is_alone):  # updated weights are gathered
        weights = np.minimum(ring.contention * sums.state.weights, sums.model.weights)
        tail = tail + ring.turn(size, weights, messages)
    if slot.is_alone:
        reduced = np.maximum(reduced - backward * (1 - 1 / sums.num_units), reduced / sums.num_units)
    return np.asarray(tail + reduced)


def _host_update(sums: StageSums, backward: Array, slot: StageSlot, mode: Mode) -> tuple[Array, Array]:
    """Returns what the backward does not hide of updates on the host and their copies, and the time of the last one."""
    out, into = (part * slot.host.link.byte_s for part in (sums.hosted.gradients, sums.hosted.weights))
    if mode.state == "window":
        into = np.zeros_like(into)
    # A CPU updates for all workers at once; the largest stage of a pipeline ends when all updates have ended.
    contended = slot.host.cpu_contention * sums.time.host_update
    update = np.minimum(contended, sums.time.model_host_update) * slot.host.updaters
    longest = np.maximum(np.maximum(update, out), into)
    return np.maximum(longest - backward, 0.0), (update + out + into) / sums.num_units


def _num_collectives(sums: StageSums, scheduled: ScheduledSlot, mode: Mode) -> Array:
    """Returns the number of collectives that reduce a stage's gradients."""
    if mode.goes_by_pieces:
        return sums.num_units
    if not scheduled.slot.is_alone:
        return np.ones_like(sums.num_units)
    return np.minimum(sums.num_units, np.ceil(sums.state.gradients / bucket_bytes(sums.model.gradients)))


def _memory(sums: StageSums, scheduled: ScheduledSlot, mode: Mode, buffers: int) -> tuple[Array, Array]:
    """Returns the peak memory of each device of a slot, and of its host on the device's behalf.

    A stage of a pipeline holds its input and output so many times in `buffers`. With more than one, replicas of a whole
    model hold the largest output between two buckets of gradients, too.
    """
    slot, size = scheduled.slot, len(scheduled.slot.group)
    activations, largest, hosted = sums.activations, sums.largest, sums.hosted
    host = np.zeros_like(sums.state.weights)
    if mode.recomputes:
        kept, piece = activations.checkpoints, largest.checkpoint
    else:
        kept, piece = activations.saved, largest.saved
    held = scheduled.live * kept
    if mode.activations == "host":
        host, held = host + held, np.minimum(held, 3 * piece)
    held = held + (activations.inputs + activations.outputs) * (1 if slot.is_alone else buffers)
    if not mode.is_plain or (slot.is_alone and size > 1 and buffers > 1):
        held = held + 2 * largest.checkpoint  # between pieces
    if mode.recomputes:
        held = held + largest.saved
    optimizer = sums.state.optimizer / (size if scheduled.zero else 1)
    weights = sums.state.weights * (2 if scheduled.is_stale else 1)
    if scheduled.zero == 3:
        weights = weights / size + (3 * largest.weights if slot.is_alone else weights)
    elif mode.state != "device":
        host = host + hosted.weights + hosted.gradients + hosted.optimizer
        optimizer = optimizer - hosted.optimizer
        weights = weights if mode.state == "host" else 3 * largest.weights
    return np.asarray(weights + sums.state.gradients + optimizer + held), np.asarray(host)
