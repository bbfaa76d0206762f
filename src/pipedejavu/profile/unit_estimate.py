"""Estimates a model's units without running them: counts operations and bytes on fake tensors.

A device's time follows the roofline, per operation: a launch plus the longer of arithmetic and memory traffic, at the
efficiency that measured operators of such devices show.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from pipedejavu.facts import InputError, Profile, Unit, UnitTime
from pipedejavu.plan import Precision
from pipedejavu.profile.dedup import unit_key
from pipedejavu.profile.line_fit import fit_line
from pipedejavu.profile.measured_unit import Report
from pipedejavu.profile.meta_model import fake_copy, mode_of
from pipedejavu.profile.operator_count import UnitWork, count_step
from pipedejavu.profile.operator_meter import OperatorWork, fused
from pipedejavu.profile.rates import Rates
from pipedejavu.profile.unit_sample import UnitSample
from pipedejavu.profile.unit_step import PARTS, LossHead
from pipedejavu.profile.unit_time import PLAIN, describe, describe_ties
from pipedejavu.runtime.compute_precision import ComputeFormat


def estimate_units(
    name: str,
    unit_samples: Sequence[UnitSample],
    ties: Sequence[frozenset[str]],
    rates: Mapping[str, Rates],
    report: Report,
    precision: Precision = PLAIN,
    *,
    is_fused: bool = False,
) -> Profile:
    """Returns the profile of a meta model that computes in a precision.

    With `is_fused`, runs of operations that are not products or attention are one kernel each, as compiled units and
    libraries of fused kernels have them.

    Times are lines over the microbatch sizes of the samples; bytes are those of the last sample. The units must be the
    same at all sizes.
    """
    last = unit_samples[-1]
    form = ComputeFormat.of(precision, [module for _, module in last.units])
    with form.context(torch.device("cpu")):
        counted = {unit_sample.samples: _count_sample(unit_sample, report, form) for unit_sample in unit_samples}
    units = []
    for index, (unit, module) in enumerate(last.units):
        by_size = {samples: works[index] for samples, works in counted.items()}
        work, *following = counted[last.samples][index : index + 2]
        sizes = describe(unit, module, work, following[0] if following else None, last.samples, form)
        units.append(sizes.replace(times={kind: _time(rate, by_size, sizes, is_fused) for kind, rate in rates.items()}))
    ties_ = describe_ties(ties, last.units, form)
    return Profile(name=name, units=tuple(units), ties=ties_, precision=str(precision))


def _count_sample(unit_sample: UnitSample, report: Report, form: ComputeFormat) -> list[UnitWork]:
    """Returns the work of each unit on a sample's microbatch."""
    known: dict[Hashable, UnitWork] = {}
    value, counted = unit_sample.inputs, []
    with mode_of([list(module.parameters()) for _, module in unit_sample.units] + [unit_sample.targets]):
        for index, (unit, module) in enumerate(unit_sample.units):
            head = unit_sample.head(index, unit_sample.targets)
            key = (unit_key(module, value), head is None, index == 0)
            if key not in known:
                report(f"{unit} ({unit_sample.samples} samples)")
                known[key] = _count(unit, _in_format(module, form), value, head, index == 0)
            counted.append(known[key])
            value = known[key].output
    return counted


def _in_format(module: nn.Module, form: ComputeFormat) -> nn.Module:
    """Returns a unit with its weights in the formats that they are computed with."""
    return fake_copy(module, mode_of([*module.parameters()]), form) if form.lowers else module


def _count(name: str, module: nn.Module, value: Any, head: LossHead | None, is_first: bool) -> UnitWork:
    try:
        return count_step(module, value, head, is_first)
    except (GuardOnDataDependentSymNode, NotImplementedError, RuntimeError) as error:
        text = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(
            f"unit '{name}' cannot be estimated, as its operations depend on values or have no rule for forms alone;"
            f" profile it without --estimate ({text})"
        ) from None


def _time(rates: Rates, counted: Mapping[int, UnitWork], unit: Unit, is_fused: bool) -> UnitTime:
    def works(work: UnitWork, part: str) -> Sequence[OperatorWork]:
        done = work.parts.get(part, ())
        return fused(done) if is_fused else done

    times = {
        part: fit_line({samples: [rates.time_s(works(work, part))] for samples, work in counted.items()})
        for part in PARTS
    }
    lines = {part: line.replace(spread=0.0) for part, line in times.items()}  # nothing was measured
    return UnitTime(update_s=rates.update_s(unit)).replace(**lines)
