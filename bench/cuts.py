"""Analytical cuts against equal cuts on real runs: two CPU workers of unequal speed, each a process of its own.

Run with `python bench/cuts.py [--times 3] [--steps 7] [MODEL ...]`. The handicap: after each forward and backward the
second worker sleeps so long that the action took `--times` as long as its thread computed. Both cuts have as many
stages; the analytical one makes the slowest stage as fast as can be, by the measured times of the units. Workers talk
over Gloo on loopback; the time of a step is the median over rounds, without the first.

Memory is what a worker's process has at most (VmHWM) above what it had (VmRSS) when its libraries were loaded and the
model was built, but nothing that training it takes was there: the weights in use, gradients, optimizer state,
activations, messages, what operators work with, and gaps of the heap. Linux only.
"""

import argparse
import ctypes
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore
from torch.multiprocessing.spawn import start_processes

from pipedejavu.engine import AdamW, Job
from pipedejavu.engine.rank_process import RankRun
from pipedejavu.facts import Device, Host, Link, Machine, Profile, keep_heap
from pipedejavu.plan import preset
from pipedejavu.planner.unit_update import updates_of
from pipedejavu.probe.gloo import measure_link
from pipedejavu.profile import UnitSample, cut_model, measure_profile
from pipedejavu.program import Action, Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.run.metrics import most_resident_bytes, resident_bytes
from pipedejavu.simulate import simulate
from pipedejavu.source.task import SampleOrder, loss_of
from pipedejavu.zoo import build

MODELS: dict[str, dict[str, object]] = {"vgg19": {}, "resnet50": {}, "gpt-10-layers": {"context": 128}}
"""And what differs from their sizes in the zoo."""
SAMPLES, MICROBATCHES = 4, 4


def machine(link: Link) -> Machine:
    """A fast and a slow worker of one host."""
    devices = [
        Device(name=kind, kind=kind, type="cpu", host="here", memory_bytes=2**40, most_workers=1)
        for kind in ("fast", "slow")
    ]
    return Machine(name="here", hosts=(Host(name="here"),), devices=tuple(devices), links=(link,))


def slowed(do: Callable[[Action], None], times: float) -> Callable[[Action], None]:
    """Returns what does an action and then sleeps until it took so many times as long as its thread computed."""

    def run(action: Action) -> None:
        began = time.thread_time()
        do(action)
        if action.kind in ("F", "B", "R"):
            time.sleep((times - 1) * (time.thread_time() - began))

    return run


def with_slow(profile: Profile, times: float) -> Profile:
    """Returns the profile with both kinds of device."""
    units = [u.replace(times={"fast": u.times["fast"], "slow": u.times["fast"].times(times)}) for u in profile.units]
    return profile.replace(units=tuple(units))


def programs(profile: Profile, link: Link, samples: int = SAMPLES) -> dict[str, Program]:
    """Returns the same pipeline under both cuts."""
    plan = preset("1f1b").at(workers=2, microbatches=MICROBATCHES, samples=samples)
    equal = plan.replace(cut=plan.cut.replace(bounds=((len(profile.units) + 1) // 2,)))
    place = machine(link)
    return {name: compile_plan(p, profile, place, fold=False) for name, p in (("equal", equal), ("analytical", plan))}


def prepare(name: str) -> tuple[Job, SampleOrder]:
    """Builds a model and opens its data."""
    task = build(name, **MODELS.get(name, {}))
    cut = cut_model(task.model, task.data.batch(range(SAMPLES))[0])
    job = Job(units=cut.units, loss=loss_of(cut, task.loss), optimizer=AdamW(lr=1e-4))
    return job, SampleOrder(task, cut, (SAMPLES,) * MICROBATCHES, seed=0)


def level_bytes() -> int:
    """Gives the system back what is free, and returns what this process has; its peak counts from now on."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes()


def work(rank: int, name: str, program: Program, times: float, steps: int, folder: str) -> None:
    """Trains as one worker, in a process of its own; leaves when each step ended and how far its memory grew."""
    keep_heap()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    size = len(program.workers)
    dist.init_process_group("gloo", store=FileStore(f"{folder}/group", size), rank=rank, world_size=size)
    job, batches = prepare(name)
    before, ends = level_bytes(), list[float]()

    run = RankRun(program, job, batches)
    if program.devices[rank] == "slow":
        run.handlers.do = slowed(run.handlers.do, times)  # type: ignore[method-assign]
    for _ in run.rounds(range(steps)):
        ends.append(time.perf_counter())
    found = {"ends_s": ends, "grown_bytes": most_resident_bytes() - before}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # what is left is on disk; the shutdown would wait for threads


def run(name: str, program: Program, times: float, steps: int) -> list[dict[str, Any]]:
    """Trains with a process for each worker; returns what each left."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(  # type: ignore[no-untyped-call]
            work, args=(name, program, times, steps, folder), nprocs=len(program.workers), start_method="spawn"
        )
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(len(program.workers))]


def compare(name: str, times: float, steps: int) -> None:
    """Prints a row for each cut of a model."""
    job, batches = prepare(name)
    unit_samples = [UnitSample(job.units, *batches.first(SAMPLES), job.loss)]
    profile = measure_profile(name, unit_samples, job.ties, {"fast": torch.device("cpu")}, updates_of(job.optimizer))
    for key, program in programs(with_slow(profile, times), measure_link()).items():
        prediction, found = simulate(program), run(name, program, times, steps)
        ends = found[0]["ends_s"]
        rate, said = (MICROBATCHES * SAMPLES / time_s for time_s in (step_s(ends), prediction.makespan_s))
        grown = mebibytes(worker["grown_bytes"] for worker in found)
        peaks = mebibytes(worker.peak_bytes for worker in prediction.workers)
        bounds = program.plan.cut.bounds
        print(f"| {name} | {key}, cut at {bounds} | {rate:.3g} | {said:.3g} | {grown} | {peaks} |", flush=True)


def mebibytes(sizes: Iterable[float]) -> str:
    """Returns sizes in MiB, which compare at a glance."""
    return ", ".join(f"{size / 2**20:,.0f}" for size in sizes) + " MiB"


def step_s(ends_s: list[float]) -> float:
    """Returns the time of a step, of which the first is left out."""
    return median(after - before for before, after in pairwise(ends_s))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=[*MODELS])
    parser.add_argument("--times", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=7)
    args = parser.parse_args()
    keep_heap()
    torch.set_num_threads(1)
    heads = ("model", "cut", "samples/s, measured", "predicted", "memory of each, measured", "predicted")
    print(f"| {' | '.join(heads)} |\n|" + "---|" * len(heads))
    for name in args.models:
        compare(name, args.times, args.steps)


if __name__ == "__main__":
    main()
