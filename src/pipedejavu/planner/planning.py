"""Planning for this machine: measures machine and model, or reads them from the cache, and searches for the best plan.

The model is measured on each kind of device, and on each fraction that a CPU may be divided into.
"""

import platform
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from pipedejavu.data.data_choice import DataChoice
from pipedejavu.engine import Job
from pipedejavu.facts import InputError, Machine, Profile, read_file
from pipedejavu.facts.start_phase import START
from pipedejavu.plan import Precision
from pipedejavu.planner.cache import find, find_or_make, keep
from pipedejavu.planner.model_key import model_key
from pipedejavu.planner.profiling import MeasureSetup, choose_sizes, fraction_setup, measure_task, this_machine
from pipedejavu.planner.replan import find_runnable
from pipedejavu.planner.worker_host import DeviceChoice, read_worker_host, torch_device
from pipedejavu.probe.machine_shape import num_cores, total_memory_bytes
from pipedejavu.probe.memory_link import measure_worker_link
from pipedejavu.probe.survey import measure_machine, read_versions
from pipedejavu.profile.time_budget import TimeBudget
from pipedejavu.profile.unit_time import PLAIN
from pipedejavu.search import Progress, RankedPlan, SearchOptions, nothing_fits, search
from pipedejavu.search.planning_problem import MOST_PARTS
from pipedejavu.search.subspace import divisors
from pipedejavu.source.rng import preserve_rng
from pipedejavu.source.trained_part import TrainedPart

MOST_SAMPLES = 8
"""Samples in the largest microbatch that is measured on CPUs; times of larger ones are extrapolated."""
MOST_GPU_SAMPLES = 32
"""The same on a machine with a GPU, which small microbatches do not fill; its plans are for larger ones."""

_SKETCH = 0.1
"""Share of the budget that a sketch takes."""

SURVEY = 5
"""Version of surveys and profiles; cached records of an older version are measured again."""

Report = Callable[[str], None]


def survey_machine(report: Callable[[str, float], None], *, renews: bool = False) -> Machine:
    """Returns the cached survey of this machine, or makes a quick one."""
    folder = Path.cwd()
    return find_or_make(
        Machine, machine_key(), lambda: measure_machine(folder, quick=True, report=report), renews=renews
    )


def keep_survey(machine: Machine) -> None:
    """Writes a survey of this machine to the cache."""
    keep(machine, machine_key())


def known_machine() -> Machine:
    """Returns the cached survey of this machine, or else its shape with only the link between workers measured."""
    survey = find(Machine, machine_key())
    if survey is not None:
        return survey
    shape = this_machine()
    devices = (d.replace(most_workers=num_cores()) if d.type == "cpu" else d for d in shape.devices)
    ends = [torch.device("cpu"), torch.device("cuda" if torch.cuda.is_available() else "cpu")]
    with START.phase("measure"):
        link = measure_worker_link(ends)
    return shape.replace(devices=tuple(devices), links=(link, *shape.links))


def machine_key() -> dict[str, object]:
    """Returns what measurements on this machine depend on: devices, memory and versions of the software."""
    worker_host = read_worker_host(platform.node() or "here", 0)
    return {"site": worker_host.to_json(), "memory": total_memory_bytes(), "survey": SURVEY, **read_versions()}


def profile_here(
    model: str,
    data: DataChoice,
    batch: int,
    machine: Machine,
    report: Report,
    *,
    renews: bool = False,
    part: TrainedPart = TrainedPart(),  # noqa: B008
    precision: Precision = PLAIN,
    budget: TimeBudget | None = None,
    is_sketch: bool = False,
) -> Profile:
    """Returns a model's profile on each kind of device of this machine, from the cache or measured in a precision.

    A sketch is measured at one size, on the first kind of device, in a tenth of the budget.
    """
    budget = budget or TimeBudget()
    limit = TimeBudget(_SKETCH * budget.total_s) if is_sketch else budget
    setups = measure_setups(machine)
    samples = most_samples(batch, setups)
    sizes = (samples,) if is_sketch else choose_sizes(samples)
    setups = setups[:1] if is_sketch else setups
    source = {"model": model, "content": source_hash(model), "data": data.name} | _changed(data)
    if not part.is_all:
        source["part"] = part.to_json()
    key = {**source, "sizes": sizes, "ways": setups, "budget": limit.total_s, **machine_key()}
    key |= {} if precision == PLAIN else {"precision": str(precision)}

    def make() -> Profile:
        with budget.spending():
            return measure_task(model, data, sizes, setups, report, precision, part, limit)

    return find_or_make(Profile, key, make, renews=renews)


def kept_profile(
    job: Job, sample: tuple[Any, Any], settings: Mapping[str, object], make: Callable[[], Profile]
) -> Profile:
    """Returns the cached profile of a job's units on batches like a sample, or makes it and writes it to the cache.

    The generators of the user's program do not change.
    """
    key = {**model_key(job.units, job.loss, *sample), "optimizer": type(job.optimizer).__qualname__}
    with preserve_rng(torch.device("cuda" if torch.cuda.is_available() else "cpu")):
        return find_or_make(Profile, {**key, **settings, **machine_key()}, make, renews=False)


def most_samples(batch: int, setups: Iterable[MeasureSetup]) -> int:
    """Returns the samples of the largest microbatch to measure for batches of some size."""
    has_gpu = any(setup.device.type == "cuda" for setup in setups)
    return min(batch, MOST_GPU_SAMPLES if has_gpu else MOST_SAMPLES)


def measure_setups(machine: Machine) -> tuple[MeasureSetup, ...]:
    """Returns how each kind of device is measured; on a machine without GPUs also fractions of its CPUs."""
    cores, setups = num_cores(), dict[str, MeasureSetup]()
    for device in machine.devices:
        setups.setdefault(device.kind, MeasureSetup(device.kind, torch_device(machine, device.name), cores))
    if all(device.type == "cpu" for device in machine.devices):
        most = max(device.most_workers for device in machine.devices)
        for parts in (n for n in divisors(most) if 1 < n <= MOST_PARTS):
            for kind in {device.kind for device in machine.devices}:
                setup = fraction_setup(kind, parts, cores)
                setups[setup.kind] = setup
    return tuple(setups.values())


def _changed(data: DataChoice) -> dict[str, object]:
    """Returns how data is read, as far as the user has said so."""
    plain = data.model_dump(exclude={"name", "held_out", "evaluation", "part"}, exclude_none=True)
    return {f"data_{name}": value for name, value in plain.items()}


def source_hash(model: str) -> str:
    """Returns a hash of the file that a model comes from; empty if it does not come from a file."""
    path = Path(model.removeprefix("hf:") if model.startswith("hf:") else model.rpartition(":")[0])
    path = path / "config.json" if path.is_dir() else path
    return sha256(read_file(path)).hexdigest() if path.is_file() else ""


def choose_plan(
    profile: Profile,
    machine: Machine,
    options: SearchOptions,
    devices: DeviceChoice = "auto",
    progress: Progress | None = None,
) -> RankedPlan:
    """Returns the best plan that the engine runs; raises InputError, with the smallest remedy, if none fits."""
    return choose_plans(profile, machine, options, 1, devices, progress)[0]


def choose_plans(
    profile: Profile,
    machine: Machine,
    options: SearchOptions,
    count: int,
    devices: DeviceChoice = "auto",
    progress: Progress | None = None,
) -> list[RankedPlan]:
    """Returns up to `count` plans that the engine runs, the best first; raises InputError if there is none."""
    if devices != "auto":
        wanted = "gpu" if devices == "shared-gpu" else devices
        names = tuple(d.name for d in machine.devices if d.type == wanted)
        if not names:
            raise InputError(f"machine '{machine.name}' has no {wanted.upper()}; use --devices auto")
        options = options.replace(devices=names)
    options = options.replace(is_runnable=True, candidates=max(count, options.candidates))
    with START.phase("search"):
        result = search(profile, machine, options, progress)
    plans = [*islice(find_runnable(result.candidates), count)]
    if not plans:
        raise nothing_fits(profile, machine, options, is_complete=result.is_complete)
    return plans
