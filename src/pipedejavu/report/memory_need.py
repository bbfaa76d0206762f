"""What training a model with AdamW takes, out of its profile: bytes by precision, and a step's time on one device."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from pipedejavu.facts import Cost, Device, InputError, Profile, Unit, joint_spread
from pipedejavu.report.replay_step import Numbers, Stay, live_peak, walk_step
from pipedejavu.simulate.allocator import Footprint, replay

_MANY = 2**20
"""Samples that no batch has."""


class Precision(NamedTuple):
    """Bytes of each parameter in training, and those of a number in an activation."""

    name: str
    weight_bytes: int
    gradient_bytes: int
    state_bytes: int
    """Two moments; for weights of 16 bits also those in 32."""

    @property
    def parameter_bytes(self) -> int:
        """All that a parameter takes."""
        return self.weight_bytes + self.gradient_bytes + self.state_bytes


SPARE = 0.01
"""Part of a GPU's memory that the largest batch leaves free: one batch needs more in one run than in another."""

PRECISIONS = (Precision("fp32", 4, 4, 8), Precision("bf16", 2, 2, 12))


@dataclass(frozen=True)
class Need:
    """Memory that training takes in one precision."""

    precision: Precision
    model_bytes: int
    """Weights, gradients and the optimizer's state."""
    saved_bytes: float
    """What the forward keeps of each sample."""
    recomputed_bytes: float
    """What is kept of each sample with recompute: the units' inputs, and all of one unit at a time."""
    profile: Profile

    def live_bytes(self, samples: int, recomputes: bool) -> float:
        """Returns the most bytes of tensors at once, in a step of so many samples on one device."""
        return live_peak(self._stays(samples, recomputes))

    def footprint(self, samples: int, recomputes: bool) -> Footprint:
        """Returns what a GPU's allocator makes of that."""
        return replay(self._stays(samples, recomputes))

    def fits(self, device: Device, samples: int, recomputes: bool) -> bool:
        """Whether a step fits a device; on a GPU by what is reserved, once free segments have gone back."""
        stays, room = self._stays(samples, recomputes), device.memory_bytes - device.reserved_bytes
        if live_peak(stays) > room:
            return False
        if device.type == "cpu":
            return True
        try:
            replay(stays, limit_bytes=room)
        except InputError:
            return False
        return True

    def most_samples(self, device: Device, recomputes: bool) -> int:
        """Returns the largest batch that fits a device; a GPU keeps a little to spare."""
        if device.type == "gpu":
            room = device.memory_bytes - device.reserved_bytes
            device = device.replace(memory_bytes=device.reserved_bytes + round((1 - SPARE) * room))
        most = 1
        while most < _MANY and self.fits(device, most, recomputes):
            most *= 2
        return bisect_left(range(most), True, key=lambda n: not self.fits(device, n + 1, recomputes))

    def _stays(self, samples: int, recomputes: bool) -> list[Stay]:
        known = _number_bytes(self.profile)
        # What several units hold in common is there once.
        whole = sum(unit.num_parameters for unit in self.profile.units)
        share = count_parameters(self.profile) / whole if whole else 1.0
        p = self.precision
        moments = tuple(share * size for size in (4.0,) * (p.state_bytes // 4))
        numbers = Numbers(p.weight_bytes, share * p.gradient_bytes, moments, share)
        return walk_step(self.profile, numbers, known, samples, recomputes)


class StepTime(NamedTuple):
    """What a step takes on one device."""

    forward_s: float
    backward_s: float
    update_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(self)


class Fold(NamedTuple):
    """Units that are alike in all but their names."""

    label: str
    units: tuple[Unit, ...]


def work_out_needs(profile: Profile) -> list[Need]:
    """Returns what training takes in each precision; activations count as numbers of the weights' size."""
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
    """Returns the number of parameters; what several units hold in common counts once."""
    again_bytes = sum(tie.size_bytes * (len(tie.units) - 1) for tie in profile.ties)
    return sum(unit.num_parameters for unit in profile.units) - round(again_bytes / _number_bytes(profile))


def _number_bytes(profile: Profile) -> float:
    """Returns the bytes of one parameter."""
    count = sum(unit.num_parameters for unit in profile.units)
    return sum(unit.parameter_bytes for unit in profile.units) / count if count else PRECISIONS[0].weight_bytes


def step_times(profile: Profile, samples: int) -> dict[str, StepTime]:
    """Returns the time of a step on each kind of device, as if the whole model were on one."""
    found = {}
    for kind in profile.units[0].times:
        times = [profile.time(unit, kind) for unit in profile.units]
        forward, backward = (Cost().plus(*(getattr(t, p) for t in times)) for p in ("forward", "backward"))
        found[kind] = StepTime(forward.at(samples), backward.at(samples), sum(t.update_s for t in times))
    return found


def step_spread(profile: Profile, samples: int) -> float:
    """Returns how far measured times of a step lie from the profile's, as a part of it: each counts by its time."""
    costs = [cost for unit in profile.units for time in unit.times.values() for cost in (time.forward, time.backward)]
    return joint_spread(costs, samples)


def fold_units(units: Sequence[Unit]) -> list[Fold]:
    """Returns the units with those that are alike together, in the order of the first of each."""
    groups: list[tuple[Unit, list[Unit]]] = []
    for unit in units:
        form = unit.replace(name="")
        group = next((own for known, own in groups if known == form), None)
        if group is None:
            groups.append((form, [unit]))
        else:
            group.append(unit)
    return [Fold(_label([unit.name for unit in group]), tuple(group)) for _, group in groups]


def _label(names: Sequence[str]) -> str:
    """Returns what names have in common, without numbers: 'block' for block0 and block1."""
    if len(names) == 1:
        return names[0]
    start = _beginning(names).rstrip(".0123456789")
    end = _beginning([name[::-1] for name in names])[::-1].lstrip("0123456789")
    return f"{len(names)} × {start}{'*' if end else ''}{end}"


def _beginning(names: Sequence[str]) -> str:
    """Returns the letters that all names begin with."""
    return "".join(letters[0] for letters in takewhile(lambda same: len({*same}) == 1, zip(*names, strict=False)))
