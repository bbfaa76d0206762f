"""The device memory of L2L over depth, forecast and run: constant, if boundary activations rest on the host.

Run with `python bench/l2l.py` on a machine with a GPU (weights are bf16 with split masters), or with `--quick` on
stand-ins for a GPU and its host. Each depth is run with boundary activations on the host (the preset), and on the
device. On a GPU the peak is the allocator's; on stand-ins it is that of the weights, gradients and activations that
are held for the device between actions, without what autograd saves inside the one layer that runs. A late copy may
hold one more gradient, and as many activations as a layer has.
"""

import argparse
import gc
import time
from statistics import median
from typing import Any

import torch

from pipedejavu.analysis import verify
from pipedejavu.engine import AdamW, Job, audit
from pipedejavu.engine.handlers import Handlers
from pipedejavu.engine.threads import Threads
from pipedejavu.facts import Device, Host, Link, Machine, Profile, format_bytes, format_seconds
from pipedejavu.plan import Plan, Precision, preset
from pipedejavu.planner.unit_update import updates_of
from pipedejavu.profile import TimeBudget, UnitSample, cut_model, measure_profile
from pipedejavu.program import Action
from pipedejavu.program import compile as compile_plan
from pipedejavu.program.value import HOST
from pipedejavu.simulate import simulate
from pipedejavu.source.task import SampleOrder, loss_of
from pipedejavu.zoo import build

LARGE = 2**40
BYTES_PER_S = 20e9
MEASURE_S = 8.0
"""Seconds for the measurement of each depth; alike layers are measured once."""


class ResidentMeter:
    """The peak bytes of the values that one worker holds for its device, seen after every action."""

    def __init__(self, handlers: Handlers):
        self.handlers, self.peak_bytes, self._do = handlers, 0, handlers.do
        handlers.do = self._run  # type: ignore[method-assign]

    def _run(self, a: Action) -> None:
        self._do(a)
        held = {}
        with self.handlers.lock:
            for value, content in self.handlers.values.items():
                if value.place != HOST:
                    held |= {id(t): t.nbytes for t in _tensors_of(content)}
        self.peak_bytes = max(self.peak_bytes, sum(held.values()))


def _tensors_of(content: Any) -> list[torch.Tensor]:
    """Returns the tensors of a value; none of the spans of a piece that is running."""
    if isinstance(content, torch.Tensor):
        return [content]
    parts = content.values() if isinstance(content, dict) else content if isinstance(content, tuple) else ()
    return [part for part in parts if isinstance(part, torch.Tensor)]


def machine() -> Machine:
    """A GPU and its host, or a stand-in that computes on the host's cores."""
    devices = (
        Device(name="gpu0", kind="gpu", type="gpu", host="here", memory_bytes=LARGE),
        Device(name="cpu", kind="cpu", type="cpu", host="here", memory_bytes=LARGE),
    )
    return Machine(name="here", hosts=(Host(name="here"),), devices=devices, links=(Link(bytes_per_s=BYTES_PER_S),))


def prepare(layers: int, args: argparse.Namespace, device: torch.device) -> tuple[Profile, Job, SampleOrder]:
    """Returns a GPT with so many layers, measured, with what it trains on."""
    task = build("gpt-tiny", layers=layers, width=args.width, heads=args.heads, context=args.context)
    cut = cut_model(task.model, task.data.batch(range(args.samples))[0])
    job = Job(units=cut.units, loss=loss_of(cut, task.loss), optimizer=AdamW(lr=1e-4))
    batches = SampleOrder(task, cut, (args.samples,) * args.microbatches, seed=0)
    unit_samples = [UnitSample(job.units, *batches.first(args.samples), job.loss)]
    kinds = {"gpu": device, "cpu": torch.device("cpu")}
    precision = precision_of(device)
    make_update = updates_of(job.optimizer, precision)
    profile = measure_profile(
        "gpt", unit_samples, job.ties, kinds, make_update, precision=precision, budget=TimeBudget(MEASURE_S)
    )
    return profile, job, batches


def precision_of(device: torch.device) -> Precision:
    """Returns bf16 with split masters on a GPU, so that weights have 16 bits, and float32 on stand-ins."""
    return Precision(compute="bf16", masters="split") if device.type == "cuda" else Precision()


def plan_of(args: argparse.Namespace, device: torch.device, activations: str) -> Plan:
    """Returns L2L with boundary activations in one of the memories."""
    plan = preset("l2l").at(microbatches=args.microbatches, samples=args.samples)
    return plan.replace(keep=plan.keep.replace(activations=activations), precision=precision_of(device))


def measure(layers: int, args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Runs a depth with both plans, prints a row, and returns the measured peaks."""
    profile, job, batches = prepare(layers, args, device)
    cells, peaks = [], {}
    for activations in ("host", "device"):
        program = compile_plan(plan_of(args, device, activations), profile, machine(), fold=False)
        forecast = simulate(program, verify(program)).workers[0].peak_bytes
        before = _allocated(device)
        threads = Threads(program, job, batches)
        meters = [ResidentMeter(handlers) for handlers in threads.handlers]
        steps_s = []
        for _ in range(args.steps):
            began = time.perf_counter()
            threads.run()
            steps_s.append(time.perf_counter() - began)
        peak = meters[0].peak_bytes if device.type == "cpu" else torch.cuda.max_memory_allocated(device) - before
        peaks[activations] = peak
        cells += [format_bytes(forecast), format_bytes(peak), format_seconds(median(steps_s[1:] or steps_s))]
        if args.audit and activations == "host":
            cells.append(f"{max(audit(program, job, batches, threads.outcome()).values()):.1e}")
        threads.close()
        del threads, meters
        gc.collect()
    print(f"| {layers} | " + " | ".join(cells) + " |", flush=True)
    return peaks


def _allocated(device: torch.device) -> int:
    """Returns the bytes that are allocated before a run, and forgets the peak so far."""
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="stand-ins on the CPU, and a narrow model")
    parser.add_argument("--layers", default="12,24,48,96")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--audit", action="store_true", help="replay each run in float64 and print how far it is")
    args = parser.parse_args()
    if args.quick:
        torch.set_num_threads(1)
        vars(args).update(width=64, heads=2, context=16, samples=1, microbatches=3, steps=2, audit=True)
    elif not torch.cuda.is_available():
        raise SystemExit("bench/l2l.py needs a GPU; --quick runs on stand-ins")
    device = torch.device("cpu" if args.quick else "cuda")
    where = "stand-ins on the CPU" if args.quick else torch.cuda.get_device_name()
    print(f"L2L on {where}, torch {torch.__version__}: width {args.width}, {args.context} tokens,", end=" ")
    print(f"{args.microbatches} microbatches of {args.samples} samples, {precision_of(device)}")
    last = " from the replay |" if args.audit else ""
    print(f"| layers | host: forecast | peak | step |{last} device: forecast | peak | step |")
    print("|---|---|---|---|---|---|---|" + "---|" * args.audit)
    rows = [measure(int(layers), args, device) for layers in args.layers.split(",")]
    for activations in ("host", "device"):
        peaks = [row[activations] for row in rows]
        print(f"boundary activations on the {activations}: largest peak / least {max(peaks) / min(peaks):.3f}")


if __name__ == "__main__":
    main()
