"""Profiles a model by name: opens it, cuts it into units for each microbatch size, and measures or estimates them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from pipedejavu.data.data_choice import DataChoice
from pipedejavu.engine import AdamW, Job
from pipedejavu.facts import Device, InputError, Machine, Profile, part_kind
from pipedejavu.facts.start_phase import START
from pipedejavu.plan import Precision
from pipedejavu.planner.measure import Make, silent_compiler, with_batches
from pipedejavu.planner.unit_update import updates_of
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
    meta_like,
    read_rates,
)
from pipedejavu.profile.measured_unit import Report
from pipedejavu.profile.time_budget import TimeBudget
from pipedejavu.profile.tp_size import with_divisions
from pipedejavu.profile.unit_time import PLAIN
from pipedejavu.source.model_source import open_task
from pipedejavu.source.task import describe_form, draw, loss_of
from pipedejavu.source.trained_part import TrainedPart
from pipedejavu.zoo import Task
from pipedejavu.zoo.gpt_profile import EFFICIENCY

_FEWEST = 3
"""Least number of microbatch sizes to measure."""
_LEAST = 2
"""Least samples in the smaller of the two sizes that are estimated; batch statistics need more than one."""


@dataclass(frozen=True)
class Profiled:
    """A model's profile, with the machine and the sizes it was made for."""

    profile: Profile
    machine: Machine
    sizes: tuple[int, ...]
    """Microbatch sizes that were profiled; the last one is the requested size."""
    sample: str
    """Shape and dtype of one sample."""
    basis: str = ""
    """A sentence on what estimated times are based on."""


class MeasureSetup(NamedTuple):
    """How one kind of device is measured on this machine."""

    kind: str
    device: torch.device
    threads: int
    beside: int = 0
    """Threads that are kept busy during the measurement, as workers on the rest of the CPU would be."""


def measure_model(
    model: str,
    samples: int,
    report: Report,
    context: int | None = None,
    parts: Sequence[int] = (),
    budget: TimeBudget | None = None,
) -> Profiled:
    """Measures a model on a device of each kind of this machine, and on fractions of its CPU: `parts` 2 for halves."""
    machine, fractions = this_machine(), _fraction_setups(parts)
    task = open_task(model, context=context)
    unit_samples, begins = _unit_samples(task, model, choose_sizes(samples), report)
    job = _job(unit_samples[-1])
    kinds = {device.kind: torch.device("cpu" if device.type == "cpu" else "cuda") for device in machine.devices}
    setups = [MeasureSetup(kind, device, torch.get_num_threads()) for kind, device in kinds.items()]
    profile = measure_with(model, unit_samples, job, [*setups, *fractions], report, budget=budget)
    return Profiled(
        divisible(profile.replace(begins=begins), unit_samples[-1], machine),
        machine,
        tuple(unit_sample.samples for unit_sample in unit_samples),
        describe_form(_batch(task, 1)[0]),
    )


def _fraction_setups(parts: Sequence[int]) -> list[MeasureSetup]:
    cores = num_cores()
    for count in parts:
        if not 2 <= count <= cores:
            raise InputError(
                f"the {cores} cores of this CPU cannot be divided into {count} parts; give --parts from 2 to {cores}"
                if cores > 1
                else f"this CPU has one core, which cannot be divided into {count} parts; leave out --parts"
            )
    return [fraction_setup("cpu", count, cores) for count in sorted(set(parts))]


def fraction_setup(kind: str, parts: int, cores: int) -> MeasureSetup:
    """Returns how one of `parts` equal fractions of a CPU is measured: while the other threads are busy."""
    threads = max(1, cores // parts)
    return MeasureSetup(part_kind(kind, parts), torch.device("cpu"), threads, cores - threads)


def measure_with(
    name: str,
    unit_samples: Sequence[UnitSample],
    job: Job,
    setups: Sequence[MeasureSetup],
    report: Report,
    make: Make | None = None,
    precision: Precision = PLAIN,
    *,
    is_compiled: bool = False,
    budget: TimeBudget | None = None,
) -> Profile:
    """Measures the units of a job with each setup in a precision, compiled or not; with `make` also loading."""
    compiler = (job.compiler or silent_compiler()) if is_compiled else None
    profile = measure_profile(
        name,
        unit_samples,
        job.ties,
        {setup.kind: setup.device for setup in setups},
        updates_of(job.optimizer, precision),
        report,
        compiler,
        precision,
        budget,
        {setup.kind: partial(_set_up, setup) for setup in setups},
    )
    if make is None:
        return profile
    sizes = [unit_sample.samples for unit_sample in unit_samples]
    for setup in setups:
        with _set_up(setup):
            profile = with_batches(profile, make, sizes, {setup.kind: setup.device})
    return profile


@contextmanager
def _set_up(setup: MeasureSetup) -> Iterator[None]:
    """Runs what is inside the `with` block with the setup's number of threads, while others are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(setup.threads)
    try:
        with background_load(setup.beside):
            yield
    finally:
        torch.set_num_threads(threads)


def measure_task(
    model: str,
    data: DataChoice,
    sizes: Sequence[int],
    setups: Sequence[MeasureSetup],
    report: Report,
    precision: Precision = PLAIN,
    part: TrainedPart = TrainedPart(),  # noqa: B008
    budget: TimeBudget | None = None,
) -> Profile:
    """Measures a model on its data at some microbatch sizes with each setup; only `part` of it is trained."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if precision.compute == "fp64" else before)
    try:
        with START.phase("build"):
            task = open_task(model, data=data, part=part)
    finally:
        torch.set_default_dtype(before)
    unit_samples, begins = _unit_samples(task, model, sizes, report)
    make = partial(draw, task.data, 0)
    job = _job(unit_samples[-1])
    profile = measure_with(model, unit_samples, job, setups, report, make, precision, budget=budget)
    return divisible(profile.replace(begins=begins), unit_samples[-1], this_machine())


def divisible(profile: Profile, unit_sample: UnitSample, machine: Machine) -> Profile:
    """Returns a profile with the divisions that its units have, if the machine has several GPUs or cores."""
    gpus = [device for device in machine.devices if device.type == "gpu"]
    num_devices = len(gpus) or sum(host.cores for host in machine.hosts)
    if num_devices == 1:
        return profile
    return with_divisions(profile, unit_sample, num_devices=num_devices, draws_alike=bool(gpus))


def _unit_samples(
    task: Task, model: str, sizes: Sequence[int], report: Report
) -> tuple[list[UnitSample], tuple[int, ...]]:
    """Cuts a model for several microbatch sizes; returns the sizes with the same units, and where the cuts begin."""
    cut: ModelCut | None = None

    def make(size: int) -> UnitSample:
        nonlocal cut
        report(f"cutting {model} for {size} samples")
        inputs, targets = _batch(task, size)
        cut = cut if cut and cut.method == "chain" else cut_model(task.model, inputs)
        return _unit_sample(task, cut, inputs, targets)

    unit_samples = make_samples(make, sizes)
    assert cut is not None
    # Cuts follow the bytes of values, which depend on the microbatch size.
    return [unit_sample for unit_sample in unit_samples if has_same_units(unit_sample, unit_samples[-1])], cut.begins


def estimate_model(
    model: str,
    samples: int,
    machine: Machine,
    report: Report,
    context: int | None = None,
    efficiencies: Mapping[str, Efficiency] | None = None,
    precision: Precision = PLAIN,
    *,
    is_fused: bool = False,
) -> Profiled:
    """Estimates a model on each kind of device of a machine, on meta tensors that take no memory.

    `efficiencies` are per type of device; by default those fitted to measured operators. With `is_fused` the model is
    compiled.
    """
    report(f"building {model} without memory")
    task = open_task(model, device="meta", context=context)
    return estimate_task(model, task, samples, machine, report, efficiencies, precision, is_fused=is_fused)


def estimate_task(
    name: str,
    task: Task,
    samples: int,
    machine: Machine,
    report: Report,
    efficiencies: Mapping[str, Efficiency] | None = None,
    precision: Precision = PLAIN,
    *,
    is_fused: bool = False,
) -> Profiled:
    """Estimates a task whose model may be on the meta device, as `estimate_model` does; the model cannot run after."""
    efficiencies = known_efficiencies() if efficiencies is None else efficiencies
    _check(samples)
    sizes = [max(_LEAST, samples // 4) if samples >= 2 * _LEAST else samples + 2, samples]  # two points make a line
    rates, mode = read_rates(machine, efficiencies, EFFICIENCY, precision.compute), make_mode()
    make_meta_model(task.model, mode)
    unit_samples, cut = [], None
    for size in sizes:
        inputs, targets = meta_like(_batch(task, size), mode)
        report(f"cutting {name} for {size} samples")
        cut = cut if cut and cut.method == "chain" else cut_model(task.model, inputs)
        unit_samples.append(_unit_sample(task, cut, inputs, targets))
    unit_samples = [unit_sample for unit_sample in unit_samples if has_same_units(unit_sample, unit_samples[-1])]
    assert cut is not None
    job = _job(unit_samples[-1])
    profile = estimate_units(name, unit_samples, job.ties, rates, report, precision, is_fused=is_fused)
    profile = divisible(profile.replace(begins=cut.begins), unit_samples[-1], machine)
    sizes = [unit_sample.samples for unit_sample in unit_samples]
    return Profiled(profile, machine, tuple(sizes), describe_form(inputs), _basis(machine, efficiencies))


def _basis(machine: Machine, fitted: Mapping[str, Efficiency]) -> str:
    """Returns a sentence on what the estimates for a machine are based on."""
    types = sorted({device.type for device in machine.devices})
    known = " and ".join(f"{name.upper()}s" for name in types if name in fitted)
    others = " and ".join(f"{name.upper()}s" for name in types if name not in fitted)
    parts = [f"from the rates of {known} and efficiencies that were fitted to measured operators"] if known else []
    parts += [f"at {EFFICIENCY:.0%} of the stated rate of {others}, which is an assumption"] if others else []
    return f"Times are estimated {', and '.join(parts)}."


def choose_sizes(samples: int) -> tuple[int, ...]:
    """Returns the microbatch sizes to measure: one sample, a quarter, a half, and last the requested size.

    If these are too few, larger sizes are inserted before the last.
    """
    _check(samples)
    others = sorted({-(-samples // part) for part in (samples, 4, 2)} - {samples})
    larger = range(samples + _FEWEST - 1 - len(others), samples, -1)
    return *others, *larger, samples


def _check(samples: int) -> None:
    if samples < 1:
        raise InputError(f"a batch has at least one sample, not {samples}")


def _batch(task: Task, samples: int) -> tuple[Any, Any]:
    """Returns the first samples of a task's data; starts again at the first if there are too few."""
    return task.data.batch([n % len(task.data) for n in range(samples)])


def _unit_sample(task: Task, cut: ModelCut, inputs: Any, targets: Any) -> UnitSample:
    """Returns the units of a cut with the microbatch that they run."""
    return UnitSample(cut.units, cut.flat(inputs), targets, loss_of(cut, task.loss))


def _job(unit_sample: UnitSample) -> Job:
    """Returns the job that trains some units with AdamW."""
    return Job(units=unit_sample.units, loss=unit_sample.loss, optimizer=AdamW(lr=1e-3))


def this_machine() -> Machine:
    """Returns the shape of this machine: all cores as one device, and its GPUs."""
    shape, (worker_host,) = read_shape(1), read_worker_hosts(1)
    gpus = [
        Device(name=f"gpu{n}", kind=gpu.kind, type="gpu", host=shape.hosts[0].name, memory_bytes=gpu.memory_bytes)
        for n, gpu in enumerate(worker_host.gpus)
    ]
    return shape.replace(devices=(*shape.devices, *gpus))
