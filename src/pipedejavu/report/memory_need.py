"""What training a model with AdamW needs, from its profile: memory by precision, and the time of a step per device."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from pipedejavu.facts import Cost, Device, InputError, Profile, Unit, joint_spread
from pipedejavu.report.replay_step import Lifetime, Numbers, live_peak, step_lifetimes
from pipedejavu.simulate.allocator import Footprint, replay

_MANY = 2**20
"""More samples than any batch has."""


class BytesPerParameter(NamedTuple):
    """Bytes per parameter in training, and per value of an activation."""

    name: str
    weight_bytes: int
    gradient_bytes: int
    state_bytes: int
    """Bytes of the two moments, and of float32 master weights if the weights have 16 bits."""

    @property
    def parameter_bytes(self) -> int:
        """Bytes per parameter in all."""
        return self.weight_bytes + self.gradient_bytes + self.state_bytes


SPARE = 0.01
"""Share of a GPU's memory that the largest batch leaves free, since the need of a batch varies between runs."""

PRECISIONS = (BytesPerParameter("fp32", 4, 4, 8), BytesPerParameter("bf16", 2, 2, 12))


@dataclass(frozen=True)
class Need:
    """Memory that training needs in one precision."""

    precision: BytesPerParameter
    model_bytes: int
    """Weights, gradients and optimizer state."""
    saved_bytes: float
    """Bytes that the forward saves per sample."""
    recomputed_bytes: float
    """Bytes saved per sample with recompute: the inputs of all units, and everything of one unit at a time."""
    profile: Profile

    def live_bytes(self, samples: int, recomputes: bool) -> float:
        """Returns the peak of live tensor bytes in a step of `samples` on one device."""
        return live_peak(self._lifetimes(samples, recomputes))

    def footprint(self, samples: int, recomputes: bool) -> Footprint:
        """Returns what a GPU's allocator needs for these tensors."""
        return replay(self._lifetimes(samples, recomputes))

    def fits(self, device: Device, samples: int, recomputes: bool) -> bool:
        """Whether a step fits a device; on a GPU, by the memory that the allocator must reserve for it."""
        lifetimes, available = self._lifetimes(samples, recomputes), device.memory_bytes - device.reserved_bytes
        if live_peak(lifetimes) > available:
            return False
        if device.type == "cpu":
            return True
        try:
            replay(lifetimes, limit_bytes=available)
        except InputError:
            return False
        return True

    def most_samples(self, device: Device, recomputes: bool) -> int:
        """Returns the largest batch that fits a device; on a GPU a small share of memory stays free."""
        if device.type == "gpu":
            available = device.memory_bytes - device.reserved_bytes
            device = device.replace(memory_bytes=device.reserved_bytes + round((1 - SPARE) * available))
        most = 1
        while most < _MANY and self.fits(device, most, recomputes):
            most *= 2
        return bisect_left(range(most), True, key=lambda n: not self.fits(device, n + 1, recomputes))

    def _lifetimes(self, samples: int, recomputes: bool) -> list[Lifetime]:
        known = _number_bytes(self.profile)
        # Parameters that several units share exist once.
        whole = sum(unit.num_parameters for unit in self.profile.units)
        share = count_parameters(self.profile) / whole if whole else 1.0
        p = self.precision
        moments = tuple(share * size for size in (4.0,) * (p.state_bytes // 4))
        numbers = Numbers(p.weight_bytes, share * p.gradient_bytes, moments, share)
        return step_lifetimes(self.profile, numbers, known, samples, recomputes)


class StepTime(NamedTuple):
    """Time of a step on one device."""

    forward_s: float
    backward_s: float
    update_s: float

    @property
    def total_s(self) -> float:
        """Time of the whole step."""
        return sum(self)


class Fold(NamedTuple):
    """Units that differ only in their names."""

    label: str
    units: tuple[Unit, ...]


def work_out_needs(profile: Profile) -> list[Need]:
    """Returns the memory that training needs in each precision; activations have the weights' dtype."""
    number_bytes = _number_bytes(profile)
    saved = [unit.activation_bytes for unit in profile.units]
    kept = sum(unit.boundary_bytes for unit in profile.units[:-1]) + max(saved)
    whole = sum(saved) - sum(unit.shared_bytes for unit in profile.units)
    return [
        Need(
            p,
            count_parameters(profile) * p.parameter_bytes,
            whole * p.weight_bytes / number_bytes,
            min(kept, whole) * p.weight_bytes / number_bytes,
            profile,
        )
        for p in PRECISIONS
    ]


def count_parameters(profile: Profile) -> int:
    """Returns the number of parameters; shared ones count once."""
    again_bytes = sum(tie.size_bytes * (len(tie.units) - 1) for tie in profile.ties)
    return sum(unit.num_parameters for unit in profile.units) - round(again_bytes / _number_bytes(profile))


def _number_bytes(profile: Profile) -> float:
    """Returns the mean bytes per parameter in the profile."""
    count = sum(unit.num_parameters for unit in profile.units)
    return sum(unit.parameter_bytes for unit in profile.units) / count if count else PRECISIONS[0].weight_bytes


def step_times(profile: Profile, samples: int) -> dict[str, StepTime]:
    """Returns the time of a step on each kind of device, with the whole model on one device."""
    times_by_kind = {}
    for kind in profile.units[0].times:
        times = [profile.time(unit, kind) for unit in profile.units]
        forward, backward = (Cost().plus(*(getattr(t, p) for t in times)) for p in ("forward", "backward"))
        times_by_kind[kind] = StepTime(forward.at(samples), backward.at(samples), sum(t.update_s for t in times))
    return times_by_kind


def step_spread(profile: Profile, samples: int) -> float:
    """Returns the spread of a step's measured times: the mean spread of its parts, weighted by time."""
    costs = [cost for unit in profile.units for time in unit.times.values() for cost in (time.forward, time.backward)]
    return joint_spread(costs, samples)


def fold_units(units: Sequence[Unit]) -> list[Fold]:
    """Groups equal units, in the order of the first of each group."""
    groups: list[tuple[Unit, list[Unit]]] = []
    for unit in units:
        form = unit.replace(name="")
        group = next((members for known, members in groups if known == form), None)
        if group is None:
            groups.append((form, [unit]))
        else:
            group.append(unit)
    return [Fold(_label([unit.name for unit in group]), tuple(group)) for _, group in groups]


def _label(names: Sequence[str]) -> str:
    """Returns the common part of names, without numbers: 'block' for block0 and block1."""
    if len(names) == 1:
        return names[0]
    start = _beginning(names).rstrip(".0123456789")
    end = _beginning([name[::-1] for name in names])[::-1].lstrip("0123456789")
    return f"{len(names)} × {start}{'*' if end else ''}{end}"


def _beginning(names: Sequence[str]) -> str:
    """Returns the longest common prefix of names."""
    return "".join(letters[0] for letters in takewhile(lambda same: len({*same}) == 1, zip(*names, strict=False)))
