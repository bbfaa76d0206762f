"""Estimates a model's units without running them: counts operations and bytes on fake tensors.

A device's time follows the roofline, per operation: a launch plus the longer of arithmetic and memory traffic, at the
efficiency that measured operators of such devices show.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from pipedejavu.facts import Device, InputError, Machine, Profile, Unit, UnitTime
from pipedejavu.profile.dedup import unit_key
from pipedejavu.profile.line_fit import fit_line
from pipedejavu.profile.meta_model import mode_of
from pipedejavu.profile.operator_count import UnitWork, count_step
from pipedejavu.profile.operator_meter import OperatorWork
from pipedejavu.profile.predictor import Efficiency
from pipedejavu.profile.unit_sample import UnitSample
from pipedejavu.profile.unit_step import PARTS, LossHead
from pipedejavu.profile.unit_time import Report, describe, describe_ties

_UPDATE_PASSES = 7
"""AdamW's passes over memory of the parameters' size: it reads weight, gradient and two moments, and writes three."""
REACHED = 0.8
"""Share of its stated rates that a device's best products and copies reach; measured rates are reached in full."""

INSIDE = {"cpu": 0.7}
"""Speed of an operator inside a model relative to its speed alone, by type of device. Inside a model its results are
new memory and its caches are cold. Fitted to models of the zoo; 1 for types without such measurements."""


@dataclass(frozen=True)
class Rates:
    """Rates that a kind of device is assumed to reach."""

    flop_per_s: float
    bytes_per_s: float
    efficiency: Efficiency
    parameters_per_s: float = 0.0
    """Parameters that the optimizer updates per second; zero if not known."""

    def time_s(self, works: Iterable[OperatorWork]) -> float:
        """Returns the time of operations that run one after another."""
        launch_s = self.efficiency.launch_s["forward"]
        return sum(launch_s + self._bound_s(work) / self.efficiency.share(work.class_) for work in works)

    def update_s(self, unit: Unit) -> float:
        """Returns the time of an update of a unit's parameters."""
        if self.parameters_per_s:
            return unit.num_parameters / self.parameters_per_s
        work = OperatorWork(0, _UPDATE_PASSES * unit.parameter_bytes, "update")
        return self.time_s([work] if unit.parameter_bytes else [])

    def _bound_s(self, work: OperatorWork) -> float:
        return max(work.flop / self.flop_per_s, work.size_bytes / self.bytes_per_s)


def read_rates(machine: Machine, efficiencies: Mapping[str, Efficiency], assumed: float) -> dict[str, Rates]:
    """Returns the rates of each kind of device that states both; raises InputError if none does.

    A type of device without a fitted efficiency is assumed to reach the share `assumed` of its arithmetic, and its full
    memory bandwidth.
    """
    rates = {
        device.kind: _rates(device, efficiencies.get(device.type), assumed, 1.0 if machine.survey else REACHED)
        for device in machine.devices
        if device.flop_per_s and device.memory_bytes_per_s
    }
    if not rates:
        names = ", ".join(device.name for device in machine.devices)
        raise InputError(
            f"no time can be estimated: of {names}, none has both flop_per_s and memory_bytes_per_s; add them to the"
            " machine file"
        )
    return rates


def _rates(device: Device, efficiency: Efficiency | None, assumed: float, reached: float) -> Rates:
    flop_per_s, bytes_per_s = device.flop_per_s, device.memory_bytes_per_s
    if efficiency is None:
        plain = Efficiency(launch_s={"forward": 0.0}, shares={"elementwise": 1.0})
        return Rates(assumed * flop_per_s, bytes_per_s, plain, device.parameters_per_s)
    share = reached * INSIDE.get(device.type, 1.0)
    return Rates(share * flop_per_s, share * bytes_per_s, efficiency, device.parameters_per_s)


def estimate_units(
    name: str,
    unit_samples: Sequence[UnitSample],
    ties: Sequence[frozenset[str]],
    rates: Mapping[str, Rates],
    report: Report,
) -> Profile:
    """Returns the profile of a meta model.

    Times are lines over the microbatch sizes of the samples; bytes are those of the last sample. The units must be the
    same at all sizes.
    """
    counted = {unit_sample.samples: _count_sample(unit_sample, report) for unit_sample in unit_samples}
    last = unit_samples[-1]
    units = []
    for index, (unit, module) in enumerate(last.units):
        by_size = {samples: works[index] for samples, works in counted.items()}
        work, *following = counted[last.samples][index : index + 2]
        sizes = describe(unit, module, work, following[0] if following else None, last.samples)
        units.append(sizes.replace(times={kind: _time(rate, by_size, sizes) for kind, rate in rates.items()}))
    return Profile(name=name, units=tuple(units), ties=describe_ties(ties, last.units))


def _count_sample(unit_sample: UnitSample, report: Report) -> list[UnitWork]:
    """Returns the work of each unit on a sample's microbatch."""
    known: dict[Hashable, UnitWork] = {}
    value, counted = unit_sample.inputs, []
    with mode_of([list(module.parameters()) for _, module in unit_sample.units] + [unit_sample.targets]):
        for index, (unit, module) in enumerate(unit_sample.units):
            head = unit_sample.head(index, unit_sample.targets)
            key = (unit_key(module, value), head is None, index == 0)
            if key not in known:
                report(f"{unit} ({unit_sample.samples} samples)")
                known[key] = _count(unit, module, value, head, index == 0)
            counted.append(known[key])
            value = known[key].output
    return counted


def _count(name: str, module: nn.Module, value: Any, head: LossHead | None, is_first: bool) -> UnitWork:
    try:
        return count_step(module, value, head, is_first)
    except (GuardOnDataDependentSymNode, NotImplementedError, RuntimeError) as error:
        text = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(
            f"unit '{name}' cannot be estimated, as its operations depend on values or have no rule for forms alone;"
            f" profile it without --estimate ({text})"
        ) from None


def _time(rates: Rates, counted: Mapping[int, UnitWork], unit: Unit) -> UnitTime:
    times = {
        part: fit_line({samples: [rates.time_s(work.parts.get(part, ()))] for samples, work in counted.items()})
        for part in PARTS
    }
    lines = {part: line.replace(spread=0.0) for part, line in times.items()}  # nothing was measured
    return UnitTime(update_s=rates.update_s(unit)).replace(**lines)
