"""Naive and analytical splits of VGG, ResNet and AmoebaNet-like chains: images per second, and memory.

The naive split gives each stage as many units. The analytical one makes the slowest stage as fast as can be, by the
estimated times of the units. Both run 1F1B, simulated on described GPUs, equal and unequal; and for real on two CPU
workers, in turns.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from pipedejavu.engine import AdamW, Job
from pipedejavu.engine.threads import Threads
from pipedejavu.facts import Cluster, FaultsError, Machine, Profile, compose, format_bytes
from pipedejavu.facts.cluster import HostGroup
from pipedejavu.plan import Plan, preset
from pipedejavu.planner.profiling import estimate_task
from pipedejavu.profile import cut_model
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.report import Compared, ExperimentFindings, FindingsTable
from pipedejavu.reproduce.cell_chain import CellChain
from pipedejavu.reproduce.experiment import Setting
from pipedejavu.reproduce.image_model import image_note, image_task
from pipedejavu.reproduce.training_study import CPU, hosts_with_cpus
from pipedejavu.simulate import simulate
from pipedejavu.source.task import SampleOrder, loss_of
from pipedejavu.zoo import Task, open_data
from pipedejavu.zoo.form import ImageForm
from pipedejavu.zoo.loss import cross_entropy

SAMPLES, MICROBATCHES, STAGES = 8, 8, 4
_EACH = ("1 x a100-80gb", "1 x v100-16gb")
"""The kinds of GPUs that times are estimated for."""
_SPLITS = ("naive", "analytical")
_ROUNDS = 4
_REAL_HEADS = ("Model", "Naive, images/s", "Analytical, images/s", "Ratio")


def run(setting: Setting) -> ExperimentFindings:
    """Simulates every model on equal and unequal GPUs, and runs them on two CPU workers."""
    gpus = {
        f"{STAGES} equal GPUs": (f"{STAGES} x a100-80gb",),
        "2 fast and 2 slow GPUs": ("2 x a100-80gb", "2 x v100-16gb"),
    }
    rows, real, gains = [], [], dict[str, list[float]]()
    for name, make in _models(setting).items():
        setting.report(f"simulating {name}")
        every = compose(Cluster(name="every kind", hosts=(HostGroup(gpus=_EACH, cpu=CPU),)))
        profile = estimate_task(name, make("meta"), SAMPLES, every, lambda _: None).profile
        for title, counted in gpus.items():
            machine = compose(Cluster(name=title, hosts=(HostGroup(gpus=counted, cpu=CPU),)))
            found = {split: _simulated(profile, machine, split) for split in _SPLITS}
            for split, (rate, memory, bounds) in found.items():
                rows.append((f"{name}, {title}", split, _listed(bounds), f"{rate:,.0f}", memory))
            gains.setdefault(title, []).append(found["analytical"][0] / found["naive"][0])
        setting.report(f"running {name} on two workers")
        real += _run_both(name, make, profile, setting)
    means = {title: sum(ratios) / len(ratios) for title, ratios in gains.items()}
    answer = "; ".join(f"on {title} by {100 * (ratio - 1):.0f} % on average" for title, ratio in means.items())
    heads = ("Model and machine", "Split", "First units of later stages", "Images/s", "Fullest GPU")
    return ExperimentFindings(
        "", "", "What does an analytical model of execution time gain over a naive split?",
        [("plan", f"1F1B, {STAGES} stages, {MICROBATCHES} microbatches of {SAMPLES} images of 32×32"),
         ("times", "estimated from stated rates")],
        [Compared(f"images per second, analytical ÷ naive: {title}", f"{ratio:.2f}",
                  meaning="asked as a hypothesis; no figure is published") for title, ratio in means.items()],
        (), [FindingsTable("Simulated", heads, rows),
             FindingsTable("Run on two CPU workers, in turns", _REAL_HEADS, real)],
        [f"The analytical split is faster {answer}. Memory follows the cut: early stages hold large images."],
        [*([] if setting.scale == "quick" else [image_note()]),
         "The real runs are of two threads on this machine; other load shows in them, and their ratio is of medians."],
    )  # fmt: skip


def _models(setting: Setting) -> dict[str, Callable[[str | None], Task]]:
    cells = partial(_cell_task, *setting.pick((8, 2), (16, 6), (64, 6)))
    every: dict[str, Callable[[str | None], Task]] = {
        "VGG19": partial(image_task, "vgg19"),
        "ResNet-50": partial(image_task, "resnet50"),
        "AmoebaNet-like": cells,
    }
    return {"AmoebaNet-like": cells} if setting.scale == "quick" else every


def _cell_task(channels: int, cells: int, device: str | None) -> Task:
    form = ImageForm(shape=(3, 32, 32), classes=10)
    model = CellChain(channels, cells, device=device)
    return Task(name="cells", model=model, loss=cross_entropy, count=len, data=open_data("random:64", form))


def _plan(split: str, profile: Profile, stages: int) -> Plan:
    plan = preset("1f1b").at(workers=stages, microbatches=MICROBATCHES, samples=SAMPLES)
    if split == "analytical":
        return plan
    bounds = tuple(round(n * len(profile.units) / stages) for n in range(1, stages))
    return plan.replace(cut=plan.cut.replace(bounds=bounds))


def _simulated(profile: Profile, machine: Machine, split: str) -> tuple[float, str, tuple[int, ...]]:
    """Returns images per second, the peak memory of the fullest worker, and the split."""
    program = compile_plan(_plan(split, profile, STAGES), profile, machine, fold=False)
    prediction = simulate(program)
    peak = format_bytes(max(worker.peak_bytes for worker in prediction.workers))
    return SAMPLES * MICROBATCHES / prediction.makespan_s, peak, program.plan.cut.bounds or ()


def _run_both(
    name: str, make: Callable[[str | None], Task], profile: Profile, setting: Setting
) -> list[tuple[str, ...]]:
    """Returns the row of real runs, whose rounds take turns; empty if the two splits are the same."""
    machine = hosts_with_cpus()
    programs: dict[str, Program] = {}
    for split in _SPLITS:
        plan = _plan(split, profile, 2)
        place = plan.place.replace(devices=("h0/cpu", "h1/cpu"))
        try:
            programs[split] = compile_plan(plan.replace(place=place), profile, machine, fold=False)
        except FaultsError:
            return []
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runs = {split: _threads(program, make, setting.seed) for split, program in programs.items()}
        times: dict[str, list[float]] = {split: [] for split in runs}
        for _ in range(1 + setting.pick(1, _ROUNDS, 3 * _ROUNDS)):
            for split, threads in runs.items():
                started = time.perf_counter()
                threads.run()
                times[split].append(time.perf_counter() - started)
        for threads in runs.values():
            threads.close()
    finally:
        torch.set_num_threads(num_threads)
    rates = {split: SAMPLES * MICROBATCHES / median(found[1:]) for split, found in times.items()}
    cells = [f"{rates[split]:.1f} (cut at {_listed(programs[split].plan.cut.bounds or ())})" for split in _SPLITS]
    return [(name, *cells, f"{rates['analytical'] / rates['naive']:.2f}")]


def _listed(bounds: Sequence[int]) -> str:
    return ", ".join(map(str, bounds))


def _threads(program: Program, make: Callable[[str | None], Task], seed: int) -> Threads:
    task = make(None)
    cut = cut_model(task.model, task.data.batch(range(SAMPLES))[0])
    job = Job(units=cut.units, loss=loss_of(cut, task.loss), optimizer=AdamW(lr=1e-4), seed=seed)
    return Threads(program, job, SampleOrder(task, cut, program.sizes, seed))
