"""Measures a model's units on devices of this machine: time, memory and boundary size, at one or more microbatch sizes.

Equal units are measured once. Everything runs on copies, so that the model's state, such as batch statistics, does not
change.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn

from pipedejavu.facts import HeadForm, Profile, Tie, Unit
from pipedejavu.facts.start_phase import START
from pipedejavu.plan import Precision
from pipedejavu.profile.expert_rows import expert_share, num_experts
from pipedejavu.profile.head_measurement import measure_head, merge_forms
from pipedejavu.profile.kind_times import MeasuredKind, MeasureSetting, measure_kind
from pipedejavu.profile.measured_unit import MakeUpdate, Report
from pipedejavu.profile.operator_count import UnitWork
from pipedejavu.profile.sequential import Units
from pipedejavu.profile.stopwatch import Stopwatch
from pipedejavu.profile.time_budget import BudgetPart, TimeBudget
from pipedejavu.profile.unit_sample import UnitSample, has_same_units
from pipedejavu.profile.unit_step import tensors_of
from pipedejavu.runtime.compiled_unit import UnitCompiler
from pipedejavu.runtime.compute_precision import FULL, ComputeFormat, allowed_tf32, parameters_of

PLAIN = Precision()


def measure_profile(
    name: str,
    unit_samples: Sequence[UnitSample],
    ties: Sequence[frozenset[str]],
    kinds: Mapping[str, torch.device],
    make_update: MakeUpdate,
    report: Report = lambda text: None,  # noqa: ARG005
    compiler: UnitCompiler | None = None,
    precision: Precision = PLAIN,
    budget: TimeBudget | None = None,
    around: Mapping[str, Callable[[], AbstractContextManager[None]]] | None = None,
) -> Profile:
    """Runs each unit forward and backward on a microbatch of each size, and its update, on a device of each kind.

    `ties` are the full names of parameters that units share. The profile has the time at each size and the line through
    them; bytes are those of the last size. The units must be the same at all sizes. They compute in `precision`. With a
    `compiler` they are timed compiled, and what they save has the bytes of compiled units, while FLOP and temporary
    bytes are those of eager ones. Each kind is measured within what `around` has for it. What the budget leaves out is
    estimated and marked.
    """
    last, budget = unit_samples[-1], budget or TimeBudget()
    form = ComputeFormat.of(precision, [module for _, module in last.units])
    assert all(has_same_units(unit_sample, last) for unit_sample in unit_samples)
    setting = MeasureSetting(unit_samples, make_update, form, compiler, report)
    measured: list[MeasuredKind] = []
    forms: list[tuple[HeadForm, ...]] = []
    with START.phase("measure"), budget.spending():
        # GPUs come first: they may rule out the CPU.
        for n, (kind, device) in enumerate(sorted(kinds.items(), key=lambda item: item[1].type == "cpu")):
            part = budget.part(1 / (len(kinds) - n))
            with (around or {}).get(kind, nullcontext)(), form.context(device), allowed_tf32(precision):
                measured.append(measure_kind(kind, device, setting, part, measured))
                forms.append(_head_forms(measured, forms, last.samples, part))
    profile = Profile(
        name=name,
        units=_describe_units(last, measured, kinds, form),
        ties=describe_ties(ties, last.units, form),
        drift={each.kind: each.drift for each in measured if each.drift is not None},
        head_forms=merge_forms(forms, 0),
        batch_bytes=last.input_bytes / last.samples,
        precision=str(precision),
        estimated={each.kind: each.estimated for each in measured if each.estimated},
    )
    measured.clear()
    if any(device.type == "cuda" for device in kinds.values()):
        torch.cuda.empty_cache()  # worker processes need the memory
    return profile


def _describe_units(
    last: UnitSample, measured: Sequence[MeasuredKind], kinds: Iterable[str], form: ComputeFormat
) -> tuple[Unit, ...]:
    """Returns the units with their bytes, which are those on the first kind, and their times on all kinds."""
    counted = [unit.counted for unit in measured[0].units]
    units = [
        describe(name, module, work, following, last.samples, form)
        for (name, module), work, following in zip(last.units, counted, (*counted[1:], None), strict=True)
    ]
    times = {each.kind: each.times for each in measured}
    return tuple(unit.replace(times={kind: times[kind][n] for kind in kinds}) for n, unit in enumerate(units))


def _head_forms(
    measured: Sequence[MeasuredKind], forms: Sequence[tuple[HeadForm, ...]], samples: int, budget: BudgetPart
) -> tuple[HeadForm, ...]:
    """Returns the last unit with its head in chunks; kinds after the first of a type have the first one's bytes."""
    *others, kind = measured
    for other, known in zip(others, forms, strict=True):
        if other.device.type == kind.device.type or not kind.is_measured:
            return tuple(form.replace(forward={}, backward={}) for form in known)
    unit = kind.units[-1]
    assert unit.head is not None
    return measure_head(
        unit.module,
        unit.value,
        unit.head,
        is_first=unit.is_first,
        kind=kind.kind,
        device=kind.device,
        work=unit.counted,
        samples=samples,
        watch=partial(Stopwatch, kind.device),
        is_timed=budget.allows(unit.expected_s),
    )


def merge_profiles(profiles: Sequence[Profile]) -> Profile:
    """Joins a model's profiles from several kinds of devices; bytes are those of the one that needs most memory."""
    fullest = max(profiles, key=lambda profile: sum(u.activation_bytes + u.backward_work_bytes for u in profile.units))
    forms = merge_forms([profile.head_forms for profile in profiles], profiles.index(fullest))
    units = []
    for unit, *same in zip(fullest.units, *(profile.units for profile in profiles), strict=True):
        units.append(unit.replace(times={kind: times for other in same for kind, times in other.times.items()}))
    batch = {kind: cost for profile in profiles for kind, cost in profile.batch.items()}
    drift = {kind: share for profile in profiles for kind, share in profile.drift.items()}
    estimated = {kind: text for profile in profiles for kind, text in profile.estimated.items()}
    return fullest.replace(units=tuple(units), batch=batch, drift=drift, head_forms=forms, estimated=estimated)


def describe_ties(ties: Sequence[frozenset[str]], units: Units, form: ComputeFormat = FULL) -> tuple[Tie, ...]:
    """Returns the parameters that units share as records of the profile, in the order given."""
    sizes_by_id = {id(p): form.gradient_bytes(part, p) for _, m in units for part, p in parameters_of(m)}
    owned = [
        (u, n, sizes_by_id[id(p)]) for u, m in units for n, p in m.named_parameters(prefix=u, remove_duplicate=False)
    ]
    records = []
    for names in ties:
        sizes = {unit: size for unit, full, size in owned if full in names}
        records.append(Tie(units=tuple(sizes), size_bytes=max(sizes.values())))
    return tuple(records)


def describe(
    name: str,
    module: nn.Module,
    counted: UnitWork,
    following: UnitWork | None,
    samples: int,
    form: ComputeFormat = FULL,
) -> Unit:
    """Returns a unit's sizes; `following` is the work of the next unit, or None for the last."""
    owned = [*parameters_of(module)]
    trained = [(part, p) for part, p in owned if p.requires_grad]
    return Unit(
        name=name,
        flop=counted.flop / samples,
        num_parameters=sum(p.numel() for p in module.parameters()),
        parameter_bytes=form.weight_bytes(module),
        gradient_bytes=sum(form.gradient_bytes(part, p) for part, p in trained),
        optimizer_bytes=sum(form.state_bytes(part, p) for part, p in trained),
        expert_share=expert_share(module),
        num_experts=num_experts(module),
        expert_rows=min((rows.num_rows for rows in counted.expert_rows), default=0) / samples,
        expert_row_bytes=sum(rows.size_bytes for rows in counted.expert_rows) / samples,
        num_convolutions=counted.num_forward("conv"),
        num_products=counted.num_forward("matmul"),
        num_attentions=counted.num_forward("attention") + counted.num_forward("softmax"),
        activation_bytes=counted.saved_bytes / samples,
        shared_bytes=min(counted.saved_output_bytes, following.saved_input_bytes) / samples if following else 0.0,
        pending_bytes=counted.pending_bytes / samples,
        input_work_bytes=counted.input_work_bytes / samples,
        pending_shared_bytes=counted.pending_output_bytes / samples,
        forward_work_bytes=counted.forward_work_bytes / samples,
        backward_work_bytes=counted.backward_work_bytes / samples,
        parameter_parts=tuple(form.bytes_of(part, p) for part, p in owned),
        activation_parts=tuple(size / samples for size in counted.saved),
        boundary_bytes=sum(t.nbytes for t in tensors_of(counted.output)) / samples,
        has_batch_statistics=any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()),
    )
