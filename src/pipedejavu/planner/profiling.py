"""From a model's name to its profile: opens the model, cuts it for each size of microbatch, and measures its units."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from pipedejavu.engine import AdamW, Job
from pipedejavu.facts import Device, InputError, Machine, Profile, part_kind
from pipedejavu.planner.measure import Make, updates_of, with_batches
from pipedejavu.planner.worker_host import read_worker_hosts
from pipedejavu.probe import read_shape
from pipedejavu.probe.machine_shape import num_cores
from pipedejavu.profile import (
    Efficiency,
    ModelCut,
    UnitSample,
    background_load,
    cut_model,
    estimate_units,
    has_same_units,
    known_efficiencies,
    make_meta_model,
    make_mode,
    make_samples,
    measure_profile,
    merge_profiles,
    meta_like,
    read_rates,
)
from pipedejavu.profile.unit_time import Report
from pipedejavu.source.model_source import open_task
from pipedejavu.source.task import describe_form, draw, loss_of
from pipedejavu.zoo import Task
from pipedejavu.zoo.gpt_shape import EFFICIENCY

_FEWEST = 3
"""Sizes that are measured, at least."""
_LEAST = 2
"""Samples of the smaller size that is estimated: batch statistics need more than one."""


@dataclass(frozen=True)
class Profiled:
    """A model's profile, and what it holds for."""

    profile: Profile
    machine: Machine
    sizes: tuple[int, ...]
    """The microbatches that were looked at; the last one is what was asked for."""
    sample: str
    """The form of one sample."""
    basis: str = ""
    """What estimated times rest on."""


class MeasureSetup(NamedTuple):
    """A kind of device, and how it is measured here."""

    kind: str
    device: torch.device
    threads: int
    beside: int = 0
    """Threads that are kept at work meanwhile, as the workers on the other parts of a CPU will be."""


def measure_model(
    model: str, samples: int, report: Report, context: int | None = None, parts: Sequence[int] = ()
) -> Profiled:
    """Measures a model on a device of each kind that this machine has, and on parts of its CPU: halves for 2."""
    machine, ways = this_machine(), _part_ways(parts)
    task = open_task(model, context=context)
    unit_samples, begins = _shots(task, model, samples, report)
    job = _job(unit_samples[-1])
    kinds = {device.kind: torch.device("cpu" if device.type == "cpu" else "cuda") for device in machine.devices}
    profile = measure_profile(model, unit_samples, job.ties, kinds, updates_of(job.optimizer), report)
    if ways:
        profile = merge_profiles([profile, measure_ways(model, unit_samples, job, ways, report)])
    return Profiled(
        profile.replace(begins=begins),
        machine,
        tuple(unit_sample.samples for unit_sample in unit_samples),
        describe_form(_batch(task, 1)[0]),
    )


def _part_ways(parts: Sequence[int]) -> list[MeasureSetup]:
    cores = num_cores()
    for count in parts:
        if not 2 <= count <= cores:
            raise InputError(
                f"the {cores} cores of this CPU cannot be divided into {count} parts; give --parts from 2 to {cores}"
                if cores > 1
                else f"this CPU has one core, which cannot be divided into {count} parts; leave out --parts"
            )
    return [part_way("cpu", count, cores) for count in sorted(set(parts))]


def part_way(kind: str, parts: int, cores: int) -> MeasureSetup:
    """Returns how a part of a CPU is measured: with its threads, while all others work."""
    threads = max(1, cores // parts)
    return MeasureSetup(part_kind(kind, parts), torch.device("cpu"), threads, cores - threads)


def measure_ways(
    name: str,
    unit_samples: Sequence[UnitSample],
    job: Job,
    ways: Sequence[MeasureSetup],
    report: Report,
    make: Make | None = None,
) -> Profile:
    """Measures the units of a job in each way, and with `make` what getting a microbatch takes.

    Torch has its own number of threads again afterwards.
    """
    threads, found, updates = torch.get_num_threads(), [], updates_of(job.optimizer)
    try:
        for way in ways:
            torch.set_num_threads(way.threads)
            with background_load(way.beside):
                profile = measure_profile(name, unit_samples, job.ties, {way.kind: way.device}, updates, report)
                if make is not None:
                    profile = with_batches(
                        profile, make, [unit_sample.samples for unit_sample in unit_samples], {way.kind: way.device}
                    )
                found.append(profile)
    finally:
        torch.set_num_threads(threads)
    return merge_profiles(found)


def measure_task(model: str, data: str | None, samples: int, ways: Sequence[MeasureSetup], report: Report) -> Profile:
    """Measures a model on its data in each way."""
    task = open_task(model, data=data)
    unit_samples, begins = _shots(task, model, samples, report)
    make = partial(draw, task.data, 0)
    return measure_ways(model, unit_samples, _job(unit_samples[-1]), ways, report, make).replace(begins=begins)


def _shots(task: Task, model: str, samples: int, report: Report) -> tuple[list[UnitSample], tuple[int, ...]]:
    """Cuts a model for microbatches of several sizes, as far as they have the same units; returns where, too."""
    cut: ModelCut | None = None

    def make(size: int) -> UnitSample:
        nonlocal cut
        report(f"cutting {model} for {size} samples")
        inputs, targets = _batch(task, size)
        cut = cut if cut and cut.way == "chain" else cut_model(task.model, inputs)
        return _shot(task, cut, inputs, targets)

    unit_samples = make_samples(make, choose_sizes(samples))
    assert cut is not None
    # A cut goes by bytes, which sizes change.
    return [unit_sample for unit_sample in unit_samples if has_same_units(unit_sample, unit_samples[-1])], cut.begins


def estimate_model(
    model: str,
    samples: int,
    machine: Machine,
    report: Report,
    context: int | None = None,
    efficiencies: Mapping[str, Efficiency] | None = None,
) -> Profiled:
    """Estimates a model on each kind of device of a machine; the model is never given memory.

    Efficiencies are by type of device, by default those that measured operators show.
    """
    efficiencies = known_efficiencies() if efficiencies is None else efficiencies
    _check(samples)
    sizes = [max(_LEAST, samples // 4) if samples >= 2 * _LEAST else samples + 2, samples]  # a line has two points
    rates = read_rates(machine, efficiencies, EFFICIENCY)
    report(f"building {model} without memory")
    task, mode = open_task(model, device="meta", context=context), make_mode()
    make_meta_model(task.model, mode)
    unit_samples, cut = [], None
    for size in sizes:
        inputs, targets = meta_like(_batch(task, size), mode)
        report(f"cutting {model} for {size} samples")
        cut = cut if cut and cut.way == "chain" else cut_model(task.model, inputs)
        unit_samples.append(_shot(task, cut, inputs, targets))
    unit_samples = [unit_sample for unit_sample in unit_samples if has_same_units(unit_sample, unit_samples[-1])]
    assert cut is not None
    profile = estimate_units(model, unit_samples, _job(unit_samples[-1]).ties, rates, report).replace(begins=cut.begins)
    sizes = [unit_sample.samples for unit_sample in unit_samples]
    return Profiled(profile, machine, tuple(sizes), describe_form(inputs), _basis(machine, efficiencies))


def _basis(machine: Machine, fitted: Mapping[str, Efficiency]) -> str:
    """Returns a sentence on what estimates of a machine's devices rest on."""
    types = sorted({device.type for device in machine.devices})
    known = " and ".join(f"{name.upper()}s" for name in types if name in fitted)
    others = " and ".join(f"{name.upper()}s" for name in types if name not in fitted)
    parts = [f"from the rates of {known} and efficiencies that were fitted to measured operators"] if known else []
    parts += [f"at {EFFICIENCY:.0%} of the stated rate of {others}, which is an assumption"] if others else []
    return f"Times are estimated {', and '.join(parts)}."


def choose_sizes(samples: int) -> tuple[int, ...]:
    """Returns the sizes of microbatch to measure: one sample, a quarter, a half, and the one asked for last.

    Where these are too few, larger ones come before it.
    """
    _check(samples)
    others = sorted({-(-samples // part) for part in (samples, 4, 2)} - {samples})
    larger = range(samples + _FEWEST - 1 - len(others), samples, -1)
    return *others, *larger, samples


def _check(samples: int) -> None:
    if samples < 1:
        raise InputError(f"a batch has at least one sample, not {samples}")


def _batch(task: Task, samples: int) -> tuple[Any, Any]:
    """Returns the first samples of a task's data, from the beginning again where there are not as many."""
    return task.data.batch([n % len(task.data) for n in range(samples)])


def _shot(task: Task, cut: ModelCut, inputs: Any, targets: Any) -> UnitSample:
    """Returns a cut model with a microbatch."""
    return UnitSample(cut.units, cut.flat(inputs), targets, loss_of(cut, task.loss))


def _job(unit_sample: UnitSample) -> Job:
    """Returns the training of what was looked at, with AdamW."""
    return Job(units=unit_sample.units, loss=unit_sample.loss, optimizer=AdamW(lr=1e-3))


def this_machine() -> Machine:
    """Returns this machine with all cores as one device, and its GPUs."""
    shape, (worker_host,) = read_shape(1), read_worker_hosts(1)
    gpus = [
        Device(name=f"gpu{n}", kind=gpu.kind, type="gpu", host=shape.hosts[0].name, memory_bytes=gpu.memory_bytes)
        for n, gpu in enumerate(worker_host.gpus)
    ]
    return shape.replace(devices=(*shape.devices, *gpus))
