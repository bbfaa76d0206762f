"""Lower bounds of the time of any plan in a subspace, by which a search skips subspaces."""

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
"""Bisection steps for the longest stage of the most even cut."""


class Bounds:
    """Lower bounds of the time of every cut of a subspace; caches them."""

    def __init__(self) -> None:
        self._summaries: dict[DeviceOrder, tuple[Counter[str], float, float]] = {}
        self._times: dict[tuple[object, ...], float] = {}
        self._longest: dict[tuple[int, str, int], float] = {}

    def least_s(self, subspace: SearchSubspace, costs: StageCosts) -> float:
        """Returns a lower bound of an update's time, or infinity if the state cannot fit."""
        kinds, largest_bytes, all_bytes = self._summary(subspace)
        mode, size = subspace.mode, 1 if subspace.is_free else subspace.sizes[0]
        weights, gradients, optimizer = costs.model
        state = gradients + (weights if mode.state != "window" and mode.zero < 3 else 0.0)
        if mode.state == "device" and not mode.zero:
            state += optimizer
        if all_bytes < state * size or (size == len(subspace.order) and largest_bytes < state):
            return inf
        key = (subspace.device_order, subspace.sizes, subspace.samples, subspace.is_stale, mode.zero > 0)
        if key not in self._times:
            self._times[key] = self._least_s(subspace, costs, kinds, size)
        return self._times[key]

    def _least_s(self, subspace: SearchSubspace, costs: StageCosts, kinds: Counter[str], size: int) -> float:
        work = {kind: sum(float(costs.times(kind)[row][-1]) for row in (0, 1)) for kind in kinds}
        stages = len(subspace.order) // size
        if subspace.is_free or subspace.is_stale or (len(kinds) > 1 and stages > 1):
            return _mixed_s(subspace, costs, kinds)
        if stages == 1:
            slot = subspace.device_order.slot(0, size)
            hidden = max(sum(float(costs.times(kind)[row][-1]) for row in (1, 2)) for kind in kinds)
            reduced = _reduced_s(slot, size, costs, subspace.mode)
            return subspace.microbatches // size * max(work.values()) + max(reduced - hidden, 0.0)
        # All groups are equal: the slowest stage is at least that of the most even cut, and each cut sends at least the
        # smallest boundary.
        kind, share = next(iter(kinds)), subspace.microbatches // size
        slots = [subspace.device_order.slot(after, size) for after in range(0, len(subspace.order), size)]
        sent = sum(slot.next.latency_s + slot.next.byte_s * float(costs.cut[1:-1].min()) for slot in slots[1:])
        around = work[kind] + 2 * sent
        reduced = min(_reduced_s(slot, size, costs, subspace.mode) for slot in slots)
        mean = max(((share - 1) * work[kind] + reduced), min(slot.ring.contention for slot in slots) * reduced) / stages
        slowest = (share - 1) * self._even_s(costs, kind, stages)
        return around + max(mean, slowest, (share - 1) // min(stages, share) * around)

    def _even_s(self, costs: StageCosts, kind: str, stages: int) -> float:
        """Returns a lower bound of the longest stage's time per microbatch, for any cut into so many stages."""
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

    def _summary(self, subspace: SearchSubspace) -> tuple[Counter[str], float, float]:
        """Returns the number of devices of each kind, the largest memory limit and the sum of all."""
        if subspace.device_order not in self._summaries:
            devices = subspace.device_order.devices
            limits = [float(d.memory_bytes - d.reserved_bytes) for d in devices]
            self._summaries[subspace.device_order] = Counter(d.kind for d in devices), max(limits), sum(limits)
        return self._summaries[subspace.device_order]


def _mixed_s(subspace: SearchSubspace, costs: StageCosts, kinds: Counter[str]) -> float:
    """Returns a lower bound for stages on groups of any size, or on devices of several kinds.

    Let w be the time of a whole microbatch on a device. A stage on g devices takes t per microbatch and adds
    z ≥ (m/g − 1)·t for its share of m microbatches. Summed over devices, Σ z/w ≥ Σ (m − g)·t/w over stages, so the
    largest z is at least (m − max g)·v / Σ 1/w; v is the sum over units of the least share of w that the unit takes on
    any kind. In addition each unit takes its time once. A tensor-parallel group of d devices takes at least t/d and
    counts d times in the sum, so the bound also holds for g groups.
    """
    each = {kind: np.diff(costs.times(kind)[0] + costs.times(kind)[1]) for kind in kinds}
    work = {kind: float(times.sum()) for kind, times in each.items()}
    if not all(work.values()):
        return 0.0
    all_s = float(np.min([each[kind] / work[kind] for kind in kinds], axis=0).sum())
    all_s /= sum(count / work[kind] for kind, count in kinds.items())
    many, largest, together = subspace.microbatches, max(subspace.sizes), max(subspace.degrees)
    # Every worker holds at least one unit.
    least = max(many * all_s, many // largest * max(float(times.min()) for times in each.values()) / together)
    once = float(np.min([*each.values()], axis=0).sum()) / together
    return least if subspace.is_stale else max(least, once + (many - largest) * all_s)


def _is_cut(ends: list[float], stages: int, most: float) -> bool:
    """Whether so many stages of at most `most` seconds hold all units, if each takes as many as it can."""
    at = 0
    for _ in range(stages):
        at = bisect_right(ends, ends[at] + most) - 1
    return at == len(ends) - 1


def _reduced_s(slot: StageSlot, size: int, costs: StageCosts, mode: Mode) -> float:
    """Returns a lower bound of the time to reduce all gradients around a ring."""
    return (size - 1) / size * costs.model.gradients * (1 if mode.zero else 2) * slot.ring.byte_s
