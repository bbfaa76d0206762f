"""The verb `profile`: profiles a model, and prints its units and the time and memory that training takes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from pipedejavu.cli.forward_passes import time_on_devices
from pipedejavu.cli.input_files import AsJson, read_model
from pipedejavu.cli.installed import require_torch
from pipedejavu.cli.terminal import print_json, styled, terminal
from pipedejavu.facts import Cost, Device, InputError, Machine, Unit, format_bytes, format_seconds, read_machine
from pipedejavu.facts.measurement import MEASURE_S
from pipedejavu.report import Need, count_parameters, fold_units, step_spread, step_times, work_out_needs

if TYPE_CHECKING:
    from pipedejavu.planner.profiling import Profiled

_BUSY = 0.5
"""Spread of measured times above which the machine is taken to be busy."""


@dataclass(frozen=True)
class ProfileRequest:
    """The arguments and options of `profile`."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help="zoo:NAME, hf:CONFIG or FILE.py:FUNCTION.")]
    batch: Annotated[int, typer.Option(help="Samples per batch.")] = 8
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens per sequence of an hf: model; by default its limit, up to 128 (4096 with --estimate)."
        ),
    ] = None
    out: Annotated[str | None, typer.Option(help="Write the profile as JSON to this file.")] = None
    estimate: Annotated[bool, typer.Option(help="Estimate instead of measuring, without allocating the model.")] = False
    precision: Annotated[
        str, typer.Option(help="With --estimate: auto (as 'train' would choose), bf16, fp16, tf32, fp32 or fp64.")
    ] = "auto"
    compile: Annotated[bool, typer.Option("--compile", help="With --estimate: as compiled or fused kernels run.")] = (
        False
    )
    machine: Annotated[
        str | None, typer.Option(help="A machine file to estimate for; by default this machine's shape.")
    ] = None
    parts: Annotated[
        list[int] | None,
        typer.Option(help="Also measure the CPU shared by this many workers; may be repeated."),
    ] = None
    forward: Annotated[
        int | None,
        typer.Option(metavar="PASSES", help="Only time so many whole forward passes of the batch on each device."),
    ] = None
    measure_budget_s: Annotated[
        float,
        typer.Option("--measure-budget", help="Seconds for measuring the model; what is left out is estimated."),
    ] = MEASURE_S
    as_json: AsJson = False


def run(request: ProfileRequest) -> None:
    """Profiles a model, and prints or writes the profile."""
    model = read_model(request.model)
    if request.machine is not None and not request.estimate:
        raise InputError("times are measured on this machine; give --machine together with --estimate")
    if (request.precision != "auto" or request.compile) and not request.estimate:
        raise InputError(
            "units are measured in fp32 and eagerly; give --precision and --compile together with --estimate"
        )
    if request.parts and request.estimate:
        raise InputError("parts of a CPU are measured; leave out --parts or --estimate")
    if request.forward is not None and (request.estimate or request.parts or request.out):
        raise InputError(
            "--forward only times whole passes on this machine; leave out --estimate, --parts and --out, which are"
            " about units"
        )
    if request.forward is not None:
        require_torch("profiling")
        time_on_devices(model, request.batch, request.context, request.forward, request.as_json)
        return
    machine = None if request.machine is None else read_machine(request.machine)
    require_torch("profiling")
    from pipedejavu.planner.precision_choice import estimated_precision
    from pipedejavu.planner.profiling import estimate_model, measure_model, this_machine
    from pipedejavu.profile import TimeBudget
    from pipedejavu.run.measure_bar import show_measuring

    budget = TimeBudget(request.measure_budget_s)
    with show_measuring(lambda: 0.0 if request.estimate else budget.spent_share) as report:
        if request.estimate:
            machine = machine or this_machine()
            chosen = estimated_precision(request.precision, machine)
            profiled = estimate_model(
                *(model, request.batch, machine, report, request.context),
                precision=chosen.precision,
                is_fused=request.compile,
            )
        else:
            profiled = measure_model(model, request.batch, report, request.context, request.parts or (), budget)
    if request.out:
        profiled.profile.save(request.out)
    if request.as_json:
        print_json(_form(profiled, request))
    else:
        _print(profiled, request)


def _print(profiled: "Profiled", request: ProfileRequest) -> None:
    console = terminal(soft_wrap=True)
    how = f"{'estimated' if request.estimate else 'measured'} at {', '.join(map(str, profiled.sizes))} samples"
    console.print(styled(profiled.profile.name, "bold"), f" {how}; a sample is {profiled.sample}\n")
    table = _table(profiled, request.batch)
    width = console.measure(table, options=console.options.update(width=500)).maximum
    terminal(width=max(width, console.width)).print(table)
    console.print()
    for sentence in _sentences(profiled, request):
        console.print(sentence)
    if request.out:
        console.print(f"wrote {request.out}")


def _table(profiled: "Profiled", samples: int) -> Table:
    kinds = list(profiled.profile.units[0].times)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("unit")
    times = [f"{part} on {kind}" if len(kinds) > 1 else part for kind in kinds for part in ("forward", "backward")]
    for column in ("parameters", "FLOP a sample", *times, "activations a sample", "boundary a sample"):
        table.add_column(column, justify="right", no_wrap=True)
    for fold in fold_units(profiled.profile.units):
        table.add_row(fold.label, *_cells(fold.units[:1], kinds, samples))
    _, *others = _cells(profiled.profile.units, kinds, samples)
    table.add_row("all", _short(count_parameters(profiled.profile)), *others, style="bold")
    return table


def _cells(units: Sequence[Unit], kinds: Sequence[str], samples: int) -> list[str]:
    """Returns the table cells of one unit, or the sums over several; times are per batch."""
    times = [
        format_seconds(Cost().plus(*(getattr(unit.times[kind], part) for unit in units)).at(samples))
        for kind in kinds
        for part in ("forward", "backward")
    ]
    counts = [_short(sum(unit.num_parameters for unit in units)), _short(sum(unit.flop for unit in units))]
    saved = format_bytes(sum(unit.activation_bytes for unit in units))
    return [*counts, *times, saved, format_bytes(units[-1].boundary_bytes)]


def _short(number: float) -> str:
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:g}"


def _sentences(profiled: "Profiled", request: ProfileRequest) -> list[str]:
    needs, samples = work_out_needs(profiled.profile), request.batch
    sentences = [
        f"Weights, gradients and the state of AdamW take {format_bytes(needs[0].model_bytes)}, in fp32 and in bf16 with"
        " fp32 master weights alike."
    ]
    for need in needs:
        saved, kept = (format_bytes(samples * size) for size in (need.saved_bytes, need.recomputed_bytes))
        about = "about " if need is not needs[0] else ""
        sentences.append(
            f"In {need.precision.name}, {samples} samples keep {about}{saved} of activations, {kept} with recompute."
        )
    for device in _largest(profiled.machine):
        sentences += [_verdict(need, device, samples) for need in needs]
    for kind, step in step_times(profiled.profile, samples).items():
        parts = zip(("forward", "backward", "update"), step, strict=True)
        sentences.append(
            f"A step of {samples} samples takes about {format_seconds(step.total_s)} on one {kind}: "
            + ", ".join(f"{part} {format_seconds(time_s)}" for part, time_s in parts)
            + "."
        )
    if request.model.startswith("hf:") and request.context is None and "int64" in profiled.sample:
        sentences.append(f"Sequences have {profiled.sample.split()[0]} tokens; --context says how many instead.")
    if request.estimate:
        sentences.append(f"{profiled.basis[:-1]}, in {profiled.profile.precision}.")
    else:
        spread = step_spread(profiled.profile, samples)
        busy = "; something else keeps this machine busy, so profile again when it is idle" if spread > _BUSY else ""
        sentences.append(f"Measured times lie within {spread:.0%} of these{busy}.")
        sentences += [f"On {kind}: {reason}." for kind, reason in profiled.profile.estimated.items()]
    return sentences


def _largest(machine: Machine) -> list[Device]:
    """Returns, for each kind, the device with the most memory."""
    by_kind: dict[str, Device] = {}
    for device in machine.devices:
        known = by_kind.get(device.kind)
        if known is None or device.memory_bytes > known.memory_bytes:
            by_kind[device.kind] = device
    return list(by_kind.values())


def _verdict(need: Need, device: Device, samples: int) -> str:
    memory = f"the {format_bytes(device.memory_bytes - device.reserved_bytes)} of {device.name}"
    text = f"In {need.precision.name} it needs {_size(need, device, samples, recomputes=False)}"
    if need.fits(device, samples, recomputes=False):
        return f"{text} and fits {memory}, which hold{_most(need, device)}."
    least = _size(need, device, samples, recomputes=True)
    if need.fits(device, samples, recomputes=True):
        return f"{text} and does not fit {memory}; with recompute it needs {least} and fits."
    if need.fits(device, 1, recomputes=True):
        return f"{text} and does not fit {memory}, with recompute {least}; they hold{_most(need, device)}."
    return f"{text} and does not fit {memory}, with recompute {least}, not even one sample; divide it over devices."


def _size(need: Need, device: Device, samples: int, recomputes: bool) -> str:
    """Returns the memory of a step: its tensors, and on a GPU the memory reserved for them."""
    live = format_bytes(need.live_bytes(samples, recomputes))
    if device.type == "cpu":
        return live
    return f"{live} ({format_bytes(need.footprint(samples, recomputes).reserved_bytes)} reserved)"


def _most(need: Need, device: Device) -> str:
    plain, least = (need.most_samples(device, recomputes) for recomputes in (False, True))
    return f" up to {plain:,} samples, {least:,} with recompute"


def _form(profiled: "Profiled", request: ProfileRequest) -> dict[str, object]:
    """Returns the profile and the needs as one object for JSON."""
    needs = work_out_needs(profiled.profile)
    devices = [
        _device_form(need, device, request.batch, recomputes)
        for device in _largest(profiled.machine)
        for need in needs
        for recomputes in (False, True)
    ]
    steps = step_times(profiled.profile, request.batch)
    return {
        "profile": json.loads(profiled.profile.to_json()),
        "is_estimated": request.estimate,
        "sizes": list(profiled.sizes),
        "sample": profiled.sample,
        "needs": [
            {
                "precision": need.precision.name,
                "model_bytes": need.model_bytes,
                "saved_bytes": need.saved_bytes,
                "recomputed_bytes": need.recomputed_bytes,
            }
            for need in needs
        ],
        "devices": devices,
        "step_s": {kind: step._asdict() | {"total_s": step.total_s} for kind, step in steps.items()},
        "files": [request.out] if request.out else [],
    }


def _device_form(need: Need, device: Device, samples: int, recomputes: bool) -> dict[str, object]:
    footprint = need.footprint(samples, recomputes) if device.type == "gpu" else None
    return {
        "device": device.name,
        "kind": device.kind,
        "memory_bytes": device.memory_bytes - device.reserved_bytes,
        "context_bytes": device.reserved_bytes,
        "precision": need.precision.name,
        "needs_bytes": need.live_bytes(samples, recomputes),
        "allocated_bytes": footprint.allocated_bytes if footprint else None,
        "reserved_bytes": footprint.reserved_bytes if footprint else None,
        "recomputes": recomputes,
        "fits": need.fits(device, samples, recomputes),
        "most_samples": need.most_samples(device, recomputes),
    }
