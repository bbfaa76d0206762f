"""Lower bounds of the time of any plan in a subspace, from which a search tells what to leave out."""

from bisect import bisect_right
from collections import Counter
from itertools import pairwise
from math import inf

import numpy as np

from pipedejavu.search.candidate_plan import Mode
from pipedejavu.search.slot import DeviceOrder, StageSlot
from pipedejavu.search.stage_cost import StageCosts
from pipedejavu.search.subspace import SearchSubspace

HALVINGS = 10
"""Of the interval in which the time of the longest stage of the most even cut lies."""


class Bounds:
    """Times that no cut of a frame can be below."""

    def __init__(self) -> None:
        self._rows: dict[DeviceOrder, tuple[Counter[str], float, float]] = {}
        self._times: dict[tuple[object, ...], float] = {}
        self._longest: dict[tuple[int, str, int], float] = {}

    def least_s(self, subspace: SearchSubspace, costs: StageCosts) -> float:
        """Returns such a time, or infinity where the state cannot fit."""
        kinds, room, rooms = self._row(subspace)
        mode, size = subspace.mode, 1 if subspace.is_free else subspace.sizes[0]
        weights, gradients, optimizer = costs.state_bytes
        state = gradients + (weights if mode.state != "window" and mode.zero < 3 else 0.0)
        if mode.state == "device" and not mode.zero:
            state += optimizer
        if rooms < state * size or (size == len(subspace.order) and room < state):
            return inf
        key = (subspace.row, subspace.sizes, subspace.samples, subspace.is_stale, mode.zero > 0)
        if key not in self._times:
            self._times[key] = self._least_s(subspace, costs, kinds, size)
        return self._times[key]

    def _least_s(self, subspace: SearchSubspace, costs: StageCosts, kinds: Counter[str], size: int) -> float:
        work = {kind: sum(float(costs.times(kind)[row][-1]) for row in (0, 1)) for kind in kinds}
        stages = len(subspace.order) // size
        if subspace.is_free or subspace.is_stale or (len(kinds) > 1 and stages > 1):
            return _mixed_s(subspace, costs, kinds)
        if stages == 1:
            place = subspace.row.place(0, size)
            hidden = max(sum(float(costs.times(kind)[row][-1]) for row in (1, 2)) for kind in kinds)
            reduced = _reduced_s(place, size, costs, subspace.mode)
            return subspace.microbatches // size * max(work.values()) + max(reduced - hidden, 0.0)
        # All groups are alike: the slowest stage is that of the most even cut, and each cut sends the least there is.
        kind, share = next(iter(kinds)), subspace.microbatches // size
        places = [subspace.row.place(after, size) for after in range(0, len(subspace.order), size)]
        sent = sum(place.next.latency_s + place.next.byte_s * float(costs.cut[1:-1].min()) for place in places[1:])
        around = work[kind] + 2 * sent
        reduced = min(_reduced_s(place, size, costs, subspace.mode) for place in places)
        mean = max(((share - 1) * work[kind] + reduced), min(p.crowd for p in places) * reduced) / stages
        slowest = (share - 1) * self._even_s(costs, kind, stages)
        return around + max(mean, slowest, (share - 1) // min(stages, share) * around)

    def _even_s(self, costs: StageCosts, kind: str, stages: int) -> float:
        """Returns what the longest of so many stages takes for a microbatch at least, however they are cut."""
        key = (id(costs), kind, stages)
        if key not in self._longest:
            ends = (costs.times(kind)[0] + costs.times(kind)[1]).tolist()
            largest = max(b - a for a, b in pairwise(ends))
            low, high = max(ends[-1] / stages, largest), ends[-1] / stages + largest
            for _ in range(HALVINGS if high > low else 0):
                middle = (low + high) / 2
                low, high = (low, middle) if _is_cut(ends, stages, middle) else (middle, high)
            self._longest[key] = low
        return self._longest[key]

    def _row(self, subspace: SearchSubspace) -> tuple[Counter[str], float, float]:
        """Returns how many devices of each kind a row has, the least room of one and the room of all."""
        if subspace.row not in self._rows:
            devices = subspace.row.devices
            rooms = [float(d.memory_bytes - d.reserved_bytes) for d in devices]
            self._rows[subspace.row] = Counter(d.kind for d in devices), max(rooms), sum(rooms)
        return self._rows[subspace.row]


def _mixed_s(subspace: SearchSubspace, costs: StageCosts, kinds: Counter[str]) -> float:
    """Returns what stages on groups of any size, or on devices of several kinds, take at least.

    Say that a whole microbatch takes w on a device. Stage k with g devices takes t for a microbatch and adds at least
    z = (m/g − 1)·t for its part of m. So Σ z/w over all devices is no less than Σ (m − g)·t/w over stages, and the
    largest z no less than (m − max g)·v / Σ 1/w, where v adds up for each unit the least of its parts of the w; beside
    it each unit takes its time once. A team of d devices takes t/d at least, and counts d times in the sum: so the same
    holds with g teams.
    """
    each = {kind: np.diff(costs.times(kind)[0] + costs.times(kind)[1]) for kind in kinds}
    work = {kind: float(times.sum()) for kind, times in each.items()}
    if not all(work.values()):
        return 0.0
    all_s = float(np.min([each[kind] / work[kind] for kind in kinds], axis=0).sum())
    all_s /= sum(count / work[kind] for kind, count in kinds.items())
    many, largest, together = subspace.microbatches, max(subspace.sizes), max(subspace.degrees)
    # Every device, or team, has a unit at least.
    least = max(many * all_s, many // largest * max(float(times.min()) for times in each.values()) / together)
    once = float(np.min([*each.values()], axis=0).sum()) / together
    return least if subspace.is_stale else max(least, once + (many - largest) * all_s)


def _is_cut(ends: list[float], stages: int, most: float) -> bool:
    """Whether so many stages, each with as much as it may have, take all units."""
    at = 0
    for _ in range(stages):
        at = bisect_right(ends, ends[at] + most) - 1
    return at == len(ends) - 1


def _reduced_s(place: StageSlot, size: int, costs: StageCosts, mode: Mode) -> float:
    """Returns what it takes at least to add up all gradients around a ring."""
    return (size - 1) / size * costs.state_bytes[1] * (1 if mode.zero else 2) * place.ring.byte_s
