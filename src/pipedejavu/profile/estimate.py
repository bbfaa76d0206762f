"""Estimates a model's units without running them: operations and bytes are counted on tensors without memory.

A device's time is that of its roofline, operation by operation: as long as its arithmetic or its memory needs,
whichever is longer. How much of the stated arithmetic rate is reached is the caller's assumption.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from pipedejavu.facts import Cost, Device, InputError, Profile, UnitTime
from pipedejavu.profile.alike import likeness
from pipedejavu.profile.blank import mode_of
from pipedejavu.profile.count import Counted, Work, count_step
from pipedejavu.profile.measure import Report, Shot, describe, describe_ties
from pipedejavu.profile.step import PARTS, Head

_UPDATE_PASSES = 7
"""Of AdamW over memory of the parameters' size: it reads weight, gradient and two moments, and writes all but one."""


@dataclass(frozen=True)
class Rates:
    """What a kind of device is taken to reach."""

    flop_per_s: float
    bytes_per_s: float

    def time_s(self, works: Iterable[Work]) -> float:
        """Returns what operations take, one after another."""
        return sum(max(work.flop / self.flop_per_s, work.size_bytes / self.bytes_per_s) for work in works)


def read_rates(devices: Iterable[Device], efficiency: float) -> dict[str, Rates]:
    """Returns the rates of each kind of device that states both; raises InputError where none does."""
    devices = list(devices)
    found = {
        d.kind: Rates(efficiency * d.flop_per_s, d.memory_bytes_per_s)
        for d in devices
        if d.flop_per_s and d.memory_bytes_per_s
    }
    if not found:
        names = ", ".join(d.name for d in devices)
        raise InputError(
            f"no time can be estimated: of {names}, none has both flop_per_s and memory_bytes_per_s; add them to the"
            " machine file"
        )
    return found


def estimate_units(
    name: str, shot: Shot, ties: Sequence[frozenset[str]], rates: Mapping[str, Rates], report: Report
) -> Profile:
    """Returns the profile of a model whose tensors have no memory, for microbatches of the shot's size."""
    known: dict[Hashable, Counted] = {}
    value, units = shot.inputs, []
    with mode_of([list(module.parameters()) for _, module in shot.units] + [shot.targets]):
        for index, (unit, module) in enumerate(shot.units):
            head = shot.head(index, shot.targets)
            key = (likeness(module, value), head is None, index == 0)
            if key not in known:
                report(unit)
                known[key] = _count(unit, module, value, head, index == 0)
            counted = known[key]
            sizes = describe(unit, module, counted, shot.samples)
            times = {kind: _time(own, counted, sizes.parameter_bytes, shot.samples) for kind, own in rates.items()}
            units.append(sizes.but(times=times))
            value = counted.output
    return Profile(name=name, units=tuple(units), ties=describe_ties(ties, shot.units))


def _count(name: str, module: nn.Module, value: Any, head: Head | None, is_first: bool) -> Counted:
    try:
        return count_step(module, value, head, is_first)
    except (GuardOnDataDependentSymNode, NotImplementedError, RuntimeError) as error:
        text = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(
            f"unit '{name}' cannot be estimated, as its operations depend on values or have no rule for forms alone;"
            f" profile it without --estimate ({text})"
        ) from None


def _time(rates: Rates, counted: Counted, parameter_bytes: int, samples: int) -> UnitTime:
    parts = {part: Cost(per_sample_s=rates.time_s(counted.parts.get(part, ())) / samples) for part in PARTS}
    return UnitTime(update_s=_UPDATE_PASSES * parameter_bytes / rates.bytes_per_s).but(**parts)
