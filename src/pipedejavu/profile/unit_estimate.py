"""Estimates a model's units without running them: counts operations and bytes on fake tensors.

A device's time follows the roofline, per operation: a launch plus the longer of arithmetic and memory traffic, at the
efficiency that measured operators of such devices show.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from pipedejavu.facts import InputError, Profile, Unit, UnitTime
from pipedejavu.profile.dedup import unit_key
from pipedejavu.profile.line_fit import fit_line
from pipedejavu.profile.measured_unit import Report
from pipedejavu.profile.meta_model import mode_of
from pipedejavu.profile.operator_count import UnitWork, count_step
from pipedejavu.profile.rates import Rates
from pipedejavu.profile.unit_sample import UnitSample
from pipedejavu.profile.unit_step import PARTS, LossHead
from pipedejavu.profile.unit_time import describe, describe_ties


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
