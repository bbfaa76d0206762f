"""Analytical cuts against equal cuts on real runs: two CPU workers of unequal speed, threads of one process.

Run with `python bench/cuts.py [--times 3] [--steps 7] [MODEL ...]`. The handicap: after each forward and backward the
second worker sleeps so long that the action took `--times` as long as its thread computed. Both cuts have as many
stages; the analytical one makes the slowest stage as fast as can be, by the measured times of the units. Steps of both
come in turn.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from pipedejavu.engine import AdamW, Job
from pipedejavu.engine.run import Threads
from pipedejavu.facts import Device, Host, Link, Machine, Profile, format_bytes
from pipedejavu.plan import preset
from pipedejavu.profile import Shot, cut_model, measure_profile
from pipedejavu.program import Action, Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import simulate
from pipedejavu.train.measure import updates_of
from pipedejavu.train.task import SampleOrder, loss_of
from pipedejavu.zoo import build

MODELS: dict[str, dict[str, object]] = {"vgg19": {}, "resnet50": {}, "gpt-10-layers": {"context": 128}}
"""And what differs from their sizes in the zoo."""
SAMPLES, MICROBATCHES = 4, 4


def machine() -> Machine:
    """A fast and a slow worker whose messages cost next to nothing."""
    devices = [
        Device(name=kind, kind=kind, type="cpu", host="here", memory_bytes=2**40, most_workers=1)
        for kind in ("fast", "slow")
    ]
    return Machine(name="here", hosts=(Host(name="here"),), devices=tuple(devices), links=(Link(bytes_per_s=5e9),))


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
    units = [u.but(times={"fast": u.times["fast"], "slow": u.times["fast"].times(times)}) for u in profile.units]
    return profile.but(units=tuple(units))


def programs(profile: Profile, samples: int) -> dict[str, Program]:
    """Returns the same pipeline under both cuts."""
    plan = preset("1f1b").at(workers=2, microbatches=MICROBATCHES, samples=samples)
    equal = plan.but(cut=plan.cut.but(bounds=((len(profile.units) + 1) // 2,)))
    return {
        name: compile_plan(p, profile, machine(), fold=False) for name, p in (("equal", equal), ("analytical", plan))
    }


def compare(name: str, times: float, steps: int) -> None:
    samples = SAMPLES
    task = build(name, **MODELS[name])
    cut = cut_model(task.model, task.data.batch(range(samples))[0])
    job = Job(units=cut.units, loss=loss_of(cut, task.loss), optimizer=AdamW(lr=1e-4))
    batches = SampleOrder(task, cut, (samples,) * MICROBATCHES, seed=0)
    shots = [Shot(job.units, *batches.first(samples), job.loss)]
    profile = measure_profile(name, shots, job.ties, {"fast": torch.device("cpu")}, updates_of(job.optimizer))
    found = programs(with_slow(profile, times), samples)
    contenders = {cut_name: Threads(program, job, batches) for cut_name, program in found.items()}
    for threads in contenders.values():
        threads.handlers[1].do = slowed(threads.handlers[1].do, times)  # type: ignore[method-assign]
    taken: dict[str, list[float]] = {key: [] for key in contenders}
    for _ in range(steps):
        for key, threads in contenders.items():
            began = time.perf_counter()
            threads.run()
            taken[key].append(time.perf_counter() - began)
    for key, program in found.items():
        prediction = simulate(program)
        rate = MICROBATCHES * samples / median(taken[key])
        said = MICROBATCHES * samples / prediction.makespan_s
        peaks = ", ".join(format_bytes(worker.peak_bytes) for worker in prediction.workers)
        bounds = program.plan.cut.bounds
        print(f"| {name} | {key}, cut at {bounds} | {rate:.3g} | {said:.3g} | {peaks} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=[*MODELS])
    parser.add_argument("--times", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | cut | samples/s, measured | predicted | memory of each, predicted |\n|---|---|---|---|---|")
    for name in args.models:
        compare(name, args.times, args.steps)


if __name__ == "__main__":
    main()
