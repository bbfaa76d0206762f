"""Accuracy against time on unequal devices: DISTREAL beside three ways to average without leaving filters out.

Run with `python bench/distreal.py [--samples own|common] [--updates 240] [--seeds 3] [--json FILE]`. Four devices whose
speeds are 1, 0.75, 0.5 and 0.25 train a small VGG and average their weights every 4 updates. Each has two or three of
the ten digits, or draws from all samples (`common`):

    waiting        every device trains the whole network, and the fast ones wait for the slowest
    fastest alone  the devices that cannot keep up are left out
    small          every device trains a network of half the filters, a quarter of the computation, as the slowest can
    distreal       each device leaves filters out so that its updates take as long as a whole one on the fastest
    distreal, table     the same with vectors of a genetic search, made first
    distreal, changing  the same, and the speeds go round the devices from average to average

Workers are threads of this process in float32, and seconds are those of the simulator on the described devices, which
runs the same programs. Each way has the learning rate of three with the least loss on training samples that are held
out. Accuracies are of the test samples.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from pipedejavu.engine import Sgd
from pipedejavu.engine.engine_state import final_buffers
from pipedejavu.engine.threads import Threads
from pipedejavu.engine.unit_random import mixed
from pipedejavu.facts import Device, Host, Link, Machine
from pipedejavu.plan import Feed, Place, Plan, Reduce, Version, preset
from pipedejavu.planner.drop_search import search_drops
from pipedejavu.reproduce.training_study import StudyRun, TrainingStudy
from pipedejavu.run.run_folder import result_of
from pipedejavu.source.task import Prepared, SampleOrder
from pipedejavu.zoo import form_of, open_data

SPEEDS = (1.0, 0.75, 0.5, 0.25)
PERIOD, SAMPLES, ROUND = 4, 16, 20
NUM_HELD, NUM_TESTED = 300, 297
RATES = (0.003, 0.01, 0.03)
FLOP_PER_S, BYTES_PER_S, LINK_BYTES_PER_S, LATENCY_S = 5e9, 5e9, 12.5e6, 1e-3
WHOLE, HALF = ((16, 16), (32, 32)), ((8, 8), (16, 16))


def machine() -> Machine:
    """Small devices of four speeds, one per host, on links of 100 Mb/s."""
    devices = [
        Device(
            name=f"d{n}", kind=f"edge-{speed:g}", type="cpu", host=f"h{n}", memory_bytes=2**32,
            flop_per_s=speed * FLOP_PER_S, memory_bytes_per_s=speed * BYTES_PER_S,
        )
        for n, speed in enumerate(SPEEDS)
    ]  # fmt: skip
    hosts = tuple(Host(name=f"h{n}") for n in range(len(SPEEDS)))
    links = (Link(bytes_per_s=LINK_BYTES_PER_S, latency_s=LATENCY_S),)
    return Machine(name="edge", hosts=hosts, devices=tuple(devices), links=links)


def study(stages: tuple[tuple[int, ...], ...]) -> TrainingStudy:
    """The model with so many filters per convolution."""
    options: dict[str, Any] = {"stages": stages, "side": 8, "channels": 1, "has_batch_norm": True}
    return TrainingStudy(
        model="vgg-small", data="digits", samples=SAMPLES, optimizer=Sgd(lr=0.01, momentum=0.9), options=options,
        test=open_data("digits", form_of("vgg-small", **options), split="test"),
        machine=machine(), devices=tuple(f"d{n}" for n in range(len(SPEEDS))),
    )  # fmt: skip


def averaging(workers: int) -> Plan:
    """Replicas that train the whole network and average their weights."""
    return Plan(
        name="averaging", place=Place(replicas=workers), feed=Feed(kind="own", samples=SAMPLES),
        version=Version(kind="local"), steps=ROUND,
        reduce=Reduce(wire="all-reduce" if workers > 1 else "none", combiner="average", period=PERIOD),
    )  # fmt: skip


def masked(drops: tuple[tuple[float, ...], ...] = ()) -> Plan:
    """DISTREAL with budgets that are the speeds."""
    plan = preset("distreal").at(samples=SAMPLES)
    feed = plan.feed.replace(budgets=SPEEDS, is_controlled=False, drops=drops)
    return plan.replace(feed=feed, steps=ROUND)


def changing() -> Plan:
    """DISTREAL with budgets that go round the devices."""
    plan = masked()
    later = tuple((*SPEEDS[n:], *SPEEDS[:n]) for n in range(1, len(SPEEDS)))
    return plan.replace(feed=plan.feed.replace(later_budgets=later))


@dataclass(frozen=True)
class Way:
    """A way to train, and the plan whose forecast has the time of its updates."""

    study: TrainingStudy
    plan: Plan
    timed: Plan | None = None

    def step_s(self) -> float:
        """Simulated seconds of an update of each device."""
        return self.study.simulated_s(self.study.program(self.timed or self.plan))


class DeviceSamples:
    """The microbatches of devices, drawn with replacement from the samples of each."""

    def __init__(self, study: TrainingStudy, seed: int, devices: int, is_common: bool, num_held: int):
        self.data, self.seed, self.devices = study.task(0).data, seed, devices
        numbers = torch.arange(len(self.data) - num_held)
        labels = self.data.batch(numbers)[1]
        in_order = numbers[labels.argsort(stable=True)]
        self.shards = [numbers] * len(SPEEDS) if is_common else in_order.chunk(len(SPEEDS))
        self.held = torch.arange(len(self.data) - num_held, len(self.data))

    @lru_cache(maxsize=64)  # noqa: B019
    def _batch(self, number: int) -> tuple[Any, Any]:
        shard = self.shards[number % self.devices]
        chance = torch.Generator().manual_seed(mixed(self.seed, number))
        return self.data.batch(shard[torch.randint(len(shard), (SAMPLES,), generator=chance)])

    def inputs(self, microbatch: int) -> Any:
        """Returns the images of a microbatch."""
        return self._batch(microbatch)[0]

    def targets(self, microbatch: int) -> Any:
        """Returns the labels of a microbatch."""
        return self._batch(microbatch)[1]

    def length(self, microbatch: int) -> int:  # noqa: ARG002
        """Returns the number of samples."""
        return SAMPLES

    def count(self, microbatch: int) -> int:  # noqa: ARG002
        """Returns the number of samples that count."""
        return SAMPLES


Figures = tuple[float, float]
"""Loss and accuracy."""


def trained(way: Way, seed: int, updates: int, rate: float, *, is_common: bool, num_held: int = 0) -> list[Figures]:
    """Trains with a seed; returns the figures after each round, of held-out samples if there are any."""
    run = StudyRun(way.study, seed, replace(way.study.optimizer, lr=rate))
    program = way.study.program(way.plan)
    batches = DeviceSamples(way.study, seed, len(program.workers), is_common, num_held)
    threads, figures = Threads(program, run.job(), batches), list[Figures]()
    while threads.updates < updates:
        threads.run()
        if not num_held or threads.updates >= updates:
            buffers = {name: b for handlers in threads.handlers for name, b in final_buffers(handlers).items()}
            weights = result_of(program, threads.outcome().weights)
            tested = batches.data.batch(batches.held) if num_held else way.study.test.batch(range(NUM_TESTED))
            figures.append(evaluated(run, {**weights, **buffers}, *tested))
    threads.close()
    return figures


def evaluated(run: StudyRun, tensors: dict[str, torch.Tensor], inputs: Any, targets: Any) -> Figures:
    """Returns the loss and the accuracy of the whole network."""
    model = run.tester.model
    model.load_state_dict({name: tensor.detach() for name, tensor in tensors.items()}, strict=False)
    with torch.no_grad():
        output = model.eval()(inputs)
    loss = float(run.tester.loss(output, targets)) / len(targets)
    return loss, float((output.argmax(-1) == targets).double().mean())


def best_rate(way: Way, updates: int, seed: int, *, is_common: bool) -> float:
    """Returns the rate with the least loss on held-out training samples."""
    losses = {}
    for rate in RATES:
        ((loss, _),) = trained(way, seed, updates, rate, is_common=is_common, num_held=NUM_HELD)
        losses[rate] = loss if loss == loss else float("inf")
    return min(losses, key=losses.__getitem__)


def searched(updates: int) -> tuple[tuple[float, ...], ...]:
    """Returns the vectors of a genetic search with this model."""
    start, run = time.perf_counter(), StudyRun(study(WHOLE), 0)
    prepared = Prepared(run.job(), SampleOrder(run.task, run.cut, [SAMPLES], 0))
    found = search_drops(prepared, masked(), updates=updates, population=12, generations=6, time_budget_s=600.0)
    print(f"genetic search: {found.tried} vectors, {updates} updates each, {time.perf_counter() - start:.0f} s")
    for vector in found.vectors:
        print(f"  {vector.cost:6.1%}  loss {vector.loss:.4f}  {' '.join(f'{share:.2f}' for share in vector.drops)}")
    return tuple(vector.drops for vector in found.vectors)


def ways(drops: tuple[tuple[float, ...], ...]) -> dict[str, Way]:
    """Returns what is compared."""
    whole, half = study(WHOLE), study(HALF)
    return {
        "waiting": Way(whole, averaging(4)),
        "fastest alone": Way(whole, averaging(1)),
        "small": Way(half, averaging(4)),
        "distreal": Way(whole, masked()),
        "distreal, table": Way(whole, masked(drops)),
        "distreal, changing": Way(whole, changing(), masked()),
    }


def curve(courses: Sequence[Sequence[Figures]], step_s: float) -> list[tuple[float, float, float]]:
    """Returns simulated seconds, and mean and deviation of the accuracies in percent, over seeds."""
    rows = []
    for number, each in enumerate(zip(*courses, strict=True), 1):
        accuracies = [100 * accuracy for _, accuracy in each]
        spread = stdev(accuracies) if len(accuracies) > 1 else 0.0
        rows.append((number * ROUND * step_s, fmean(accuracies), spread))
    return rows


def at(rows: Sequence[tuple[float, float, float]], seconds: float) -> str:
    """Returns the accuracy at a time, and its deviation over seeds."""
    known = [row for row in rows if row[0] <= seconds * (1 + 1e-9)]
    return f"{known[-1][1]:.1f} ± {known[-1][2]:.1f}" if known else "–"


def main() -> None:
    """Trains in all ways, and prints accuracies at common times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", choices=("own", "common"), default="own", help="what devices draw from")
    parser.add_argument("--updates", type=int, default=240, help="updates of each device")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--search-updates", type=int, default=80, help="updates of each vector of the search")
    parser.add_argument("--json", help="write the curves to this file")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    started_s, curves = time.perf_counter(), dict[str, list[tuple[float, float, float]]]()
    for name, way in ways(searched(asked.search_updates)).items():
        is_common = asked.samples == "common"
        rate = best_rate(way, asked.updates, asked.seeds, is_common=is_common)
        seeds = range(asked.seeds)
        courses = [trained(way, seed, asked.updates, rate, is_common=is_common) for seed in seeds]
        curves[name] = curve(courses, way.step_s())
        last = curves[name][-1]
        step = f"{way.step_s() * 1e3:.1f} ms per update"
        print(f"{name:20} rate {rate:<6g} {step}, {last[1]:.1f} % after {last[0]:.1f} s", flush=True)
    end = curves["distreal"][-1][0]
    times = [end / 4, end / 2, end, 2 * end, 4 * end]
    print("\n| " + " | ".join(["test accuracy, %", *(f"{seconds:.1f} s" for seconds in times), "at the end"]) + " |")
    print("|" + "---|" * (len(times) + 2))
    for name, rows in curves.items():
        cells = [at(rows, seconds) if seconds <= rows[-1][0] * (1 + 1e-9) else "" for seconds in times]
        print("| " + " | ".join([name, *cells, at(rows, rows[-1][0])]) + " |")
    goal = min(max(row[1] for row in rows) for name, rows in curves.items() if name in ("waiting", "distreal"))
    for name, rows in curves.items():
        reached = next((row[0] for row in rows if row[1] >= goal), None)
        print(f"{name}: {goal:.1f} % " + ("not reached" if reached is None else f"after {reached:.1f} s"))
    print(f"{time.perf_counter() - started_s:.0f} s in all")
    if asked.json:
        Path(asked.json).write_text(json.dumps(curves))


if __name__ == "__main__":
    main()
