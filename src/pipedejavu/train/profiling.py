"""From a model's name to its profile: opens the model, cuts it for each size of microbatch, and measures its units."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from pipedejavu.engine import AdamW, Job
from pipedejavu.facts import Device, InputError, Machine, Profile, part_kind
from pipedejavu.probe import read_shape
from pipedejavu.probe.shape import num_cores
from pipedejavu.profile import (
    Cut,
    Efficiency,
    Shot,
    blank_like,
    company,
    cut_model,
    estimate_units,
    has_same_units,
    known_efficiencies,
    make_blank,
    make_mode,
    make_shots,
    measure_profile,
    merge_profiles,
    read_rates,
)
from pipedejavu.profile.measure import Report
from pipedejavu.train.door import open_task
from pipedejavu.train.measure import Make, updates_of, with_batches
from pipedejavu.train.site import read_sites
from pipedejavu.train.task import describe_form, draw, loss_of
from pipedejavu.zoo import Task
from pipedejavu.zoo.shape import EFFICIENCY

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


class Way(NamedTuple):
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
    shots, begins = _shots(task, model, samples, report)
    job = _job(shots[-1])
    kinds = {device.kind: torch.device("cpu" if device.type == "cpu" else "cuda") for device in machine.devices}
    profile = measure_profile(model, shots, job.ties, kinds, updates_of(job.optimizer), report)
    if ways:
        profile = merge_profiles([profile, measure_ways(model, shots, job, ways, report)])
    return Profiled(
        profile.but(begins=begins), machine, tuple(shot.samples for shot in shots), describe_form(_batch(task, 1)[0])
    )


def _part_ways(parts: Sequence[int]) -> list[Way]:
    cores = num_cores()
    for count in parts:
        if not 2 <= count <= cores:
            raise InputError(
                f"the {cores} cores of this CPU cannot be divided into {count} parts; give --parts from 2 to {cores}"
                if cores > 1
                else f"this CPU has one core, which cannot be divided into {count} parts; leave out --parts"
            )
    return [part_way("cpu", count, cores) for count in sorted(set(parts))]


def part_way(kind: str, parts: int, cores: int) -> Way:
    """Returns how a part of a CPU is measured: with its threads, while all others work."""
    threads = max(1, cores // parts)
    return Way(part_kind(kind, parts), torch.device("cpu"), threads, cores - threads)


def measure_ways(
    name: str, shots: Sequence[Shot], job: Job, ways: Sequence[Way], report: Report, make: Make | None = None
) -> Profile:
    """Measures the units of a job in each way, and with `make` what getting a microbatch takes.

    Torch has its own number of threads again afterwards.
    """
    threads, found, updates = torch.get_num_threads(), [], updates_of(job.optimizer)
    try:
        for way in ways:
            torch.set_num_threads(way.threads)
            with company(way.beside):
                profile = measure_profile(name, shots, job.ties, {way.kind: way.device}, updates, report)
                if make is not None:
                    profile = with_batches(profile, make, [shot.samples for shot in shots], {way.kind: way.device})
                found.append(profile)
    finally:
        torch.set_num_threads(threads)
    return merge_profiles(found)


def measure_task(model: str, data: str | None, samples: int, ways: Sequence[Way], report: Report) -> Profile:
    """Measures a model on its data in each way."""
    task = open_task(model, data=data)
    shots, begins = _shots(task, model, samples, report)
    make = partial(draw, task.data, 0)
    return measure_ways(model, shots, _job(shots[-1]), ways, report, make).but(begins=begins)


def _shots(task: Task, model: str, samples: int, report: Report) -> tuple[list[Shot], tuple[int, ...]]:
    """Cuts a model for microbatches of several sizes, as far as they have the same units; returns where, too."""
    cut: Cut | None = None

    def make(size: int) -> Shot:
        nonlocal cut
        report(f"cutting {model} for {size} samples")
        inputs, targets = _batch(task, size)
        cut = cut if cut and cut.way == "chain" else cut_model(task.model, inputs)
        return _shot(task, cut, inputs, targets)

    shots = make_shots(make, choose_sizes(samples))
    assert cut is not None
    # A cut goes by bytes, which sizes change.
    return [shot for shot in shots if has_same_units(shot, shots[-1])], cut.begins


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
    make_blank(task.model, mode)
    shots, cut = [], None
    for size in sizes:
        inputs, targets = blank_like(_batch(task, size), mode)
        report(f"cutting {model} for {size} samples")
        cut = cut if cut and cut.way == "chain" else cut_model(task.model, inputs)
        shots.append(_shot(task, cut, inputs, targets))
    shots = [shot for shot in shots if has_same_units(shot, shots[-1])]
    assert cut is not None
    profile = estimate_units(model, shots, _job(shots[-1]).ties, rates, report).but(begins=cut.begins)
    sizes = [shot.samples for shot in shots]
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


def _shot(task: Task, cut: Cut, inputs: Any, targets: Any) -> Shot:
    """Returns a cut model with a microbatch."""
    return Shot(cut.units, cut.flat(inputs), targets, loss_of(cut, task.loss))


def _job(shot: Shot) -> Job:
    """Returns the training of what was looked at, with AdamW."""
    return Job(units=shot.units, loss=shot.loss, optimizer=AdamW(lr=1e-3))


def this_machine() -> Machine:
    """Returns this machine with all cores as one device, and its GPUs."""
    shape, (site,) = read_shape(1), read_sites(1)
    gpus = [
        Device(name=f"gpu{n}", kind=gpu.kind, type="gpu", host=shape.hosts[0].name, memory_bytes=gpu.memory_bytes)
        for n, gpu in enumerate(site.gpus)
    ]
    return shape.but(devices=(*shape.devices, *gpus))
