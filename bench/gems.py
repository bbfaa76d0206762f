"""GEMS-master with state on the host, on real runs: a model that its devices could not hold otherwise.

Run with `python bench/gems.py [--model gpt-tiny] [--context N] [--workers 4] [--steps 3]`. Two replicas of the model in
opposite directions hold its weights twice; each stand-in for a GPU has `--room` times what the design needs with all
optimizer state on the host, and less than without. What is refused is printed with its reason, what fits is run (by
threads of this process), replayed in float64 and set beside the same design on devices that have room for all.
"""

import argparse
import time
from statistics import median

import torch

from pipedejavu.analysis import verify
from pipedejavu.engine import AdamW, Job, audit
from pipedejavu.engine.threads import Threads
from pipedejavu.facts import Device, FaultsError, Host, Link, Machine, Profile, format_bytes, format_seconds
from pipedejavu.plan import Plan, preset
from pipedejavu.planner.unit_update import updates_of
from pipedejavu.profile import UnitSample, cut_model, measure_profile
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import simulate
from pipedejavu.source.task import SampleOrder, loss_of
from pipedejavu.zoo import build

SAMPLES, MICROBATCHES = 2, 4
LARGE = 2**40


def machine(workers: int, room_bytes: int) -> Machine:
    """Stand-ins for GPUs of one host, which compute on its cores."""
    gpus = [
        Device(name=f"gpu{n}", kind="stand-in", type="gpu", host="here", memory_bytes=room_bytes)
        for n in range(workers)
    ]
    cpu = Device(name="cpu", kind="cpu", type="cpu", host="here", memory_bytes=LARGE)
    return Machine(name="here", hosts=(Host(name="here"),), devices=(*gpus, cpu), links=(Link(bytes_per_s=5e9),))


def designs(workers: int) -> dict[str, Plan]:
    """GEMS-master as it is, with its optimizer state on the host, and with its weights there too."""
    gems = preset("gems-master").at(workers=workers, microbatches=MICROBATCHES, samples=SAMPLES)
    eager = gems.order.replace(is_eager=True)
    return {
        "all on the device": gems,
        "optimizer state on the host": gems.replace(keep=gems.keep.replace(kind="split"), order=eager),
        "weights through a window too": gems.replace(
            keep=gems.keep.replace(kind="host", window=2), order=eager.replace(prefetch=1)
        ),
    }


def peak_of(program: Program) -> float:
    """Returns the highest forecast need of a device."""
    return max(worker.peak_bytes for worker in simulate(program).workers)


def trained(program: Program, job: Job, batches: SampleOrder, steps: int) -> tuple[float, float]:
    """Returns the median time of a step, and how far the run is from its replay."""
    threads, taken = Threads(program, job, batches), []
    for _ in range(steps):
        began = time.perf_counter()
        threads.run()
        taken.append(time.perf_counter() - began)
    return median(taken), max(audit(program, job, batches, threads.outcome()).values())


def prepare(name: str, context: int | None = None) -> tuple[Profile, Job, SampleOrder]:
    """Returns a model of the zoo, measured, with what it trains on."""
    task = build(name, **({} if context is None else {"context": context}))
    cut = cut_model(task.model, task.data.batch(range(SAMPLES))[0])
    job = Job(units=cut.units, loss=loss_of(cut, task.loss), optimizer=AdamW(lr=1e-4))
    batches = SampleOrder(task, cut, (SAMPLES,) * MICROBATCHES, seed=0)
    unit_samples = [UnitSample(job.units, *batches.first(SAMPLES), job.loss)]
    kinds = {"stand-in": torch.device("cpu"), "cpu": torch.device("cpu")}
    return measure_profile(name, unit_samples, job.ties, kinds, updates_of(job.optimizer)), job, batches


def compare(profile: Profile, job: Job, batches: SampleOrder, args: argparse.Namespace) -> None:
    found = designs(args.workers)
    large = {name: compile_plan(p, profile, machine(args.workers, LARGE), fold=False) for name, p in found.items()}
    room = round(args.room * peak_of(large["optimizer state on the host"]))
    print(f"| design on {args.workers} devices of {format_bytes(room)} | need | a step | from its replay |")
    print("|---|---|---|---|")
    for name, plan in found.items():
        need = format_bytes(peak_of(large[name]))
        try:
            program = compile_plan(plan, profile, machine(args.workers, room), fold=False)
            verify(program)
        except FaultsError as fault:
            print(f"| {name} | {need} | refused: {fault.faults[0]} | |")
            taken, difference = trained(large[name], job, batches, args.steps)
            print(f"| the same, were there room | {need} | {format_seconds(taken)} | {difference:.1e} |", flush=True)
            continue
        taken, difference = trained(program, job, batches, args.steps)
        print(f"| {name} | {need} | {format_seconds(taken)} | {difference:.1e} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gpt-tiny")
    parser.add_argument("--context", type=int)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--room", type=float, default=1.1)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    profile, job, batches = prepare(args.model, args.context)
    size = sum(unit.num_parameters for unit in profile.units)
    print(f"{args.model}: {size:,} parameters in {len(profile.units)} units")
    compare(profile, job, batches, args)


if __name__ == "__main__":
    main()
