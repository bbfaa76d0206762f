"""Faults, injected one by one: what is left of a checkpoint, and whether runs go on to the weights they would have had.

    python bench/faults.py [--runs 3] [--kills 100] [--jobs 1] > docs/reliability.md
    python bench/faults.py --keep FOLDER --seconds 200     # a part of it; the same again goes on
    python bench/faults.py --keep FOLDER --only disk       # the faults whose names have this
    python bench/faults.py --keep FOLDER --also OTHER      # a page with what another machine has injected, too

Runs are real processes, signals and file systems; a fault inside a worker happens at a random call of a phase. Every
random choice has a seed. Exits with 1 if a run did not go on, or ended with other weights.
"""

import argparse
import json
import math
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
from fault_change import ELASTIC, ELASTIC_STEPS, Changed, change, lose_and_return
from fault_change import STEPS as CHANGE_STEPS
from fault_checkpoint import checkpoints_alone
from fault_fork import ForkServer
from fault_run import EVERY, FAULTS, FORKS, HANG_S, PLANS, STEPS, Fault, NotHereError, Result, inject, undisturbed
from fault_server import PLAN, SERVER_PHASES, WORKERS, Outlived, lose_worker
from fault_worker import STEP_S
from safetensors.torch import load_file

HEAD = """# Reliability

Made by `{command}` on {machine}: real processes, real signals, every random
choice from a seed. [checkpoints.md](checkpoints.md) says how it works.

## Runs

`zoo:mlp` under AdamW, two workers, {steps} steps of {step:.0f} ms or more, a checkpoint every {every}. Each run is
disturbed once, at a random step, and goes on with `--resume` under the same plan; under `torchrun` it does by itself.
Two hosts are network namespaces with a cable between them; a full disk is a small tmpfs that holds the run folder, a
frozen one a file system of its own (`fsfreeze`). *Equal*: all weights have the bits of the undisturbed run (on two
hosts if the disturbed one was). *Every
step*: the metrics hold each step once. *Named*: the exit code and a sentence say what happened; a checkpoint of a newer
program is refused first, untouched. *Lost*: steps that were trained again; an interval has {every}, and fewer than
{every} more may pass while a checkpoint is being written; if the newest one was damaged, an interval more. *Training
again*: seconds from the start of `--resume` to its first finished step, under `torchrun` from the last step before the
fault, with {jobs} at once; processes that start and import torch take most of it. Workers hang
after {hang} s here (`--hang-after`).

| fault | plan | injected | equal | every step | named | lost, median (most) | training again, median (most) |
|---|---|---|---|---|---|---|---|"""

CHANGED = """
## Runs that change their plan

The same model under SGD and `ddp`; at a random step one of the two workers becomes slow for good (50 ms more in each
pass, of 300 steps), or its device runs out of memory (30 steps); or of two hosts, each with an agent of `torchrun`,
one is killed for good, and later another comes (`--plan auto`, {elastic} steps). The run is not started again: it goes
on under another plan from a checkpoint. *Went on*: to the end, each step once in the metrics. *Difference*: the largest
of any weight to the undisturbed run, in float32. *Without a step*: seconds between the end of the old plan
and the first step of the new one; for hosts from when one is killed or started, with the 5 s that `torchrun` waits for
others.

| fault | injected | went on | difference | without a step, median (most) |
|---|---|---|---|---|"""

OUTLIVED = """
## A server that outlives its workers

The same model and steps under `{plan}` with {workers} workers and a server, and `--audit`; one worker is killed, at a
random call. *Went on*: to the end in the same run, and the audit of the recorded updates passed. *Every step*, *named*:
as above. *Longest without a step*: between the losses of any two steps.

| fault | injected | went on | every step | named | longest without a step, median (most) |
|---|---|---|---|---|---|"""

ALONE, MACHINES = "Checkpoints alone", "machines"


def machine() -> str:
    """Describes this machine."""
    return f"{os.cpu_count()} cores of {platform.machine()} with torch {torch.__version__}"


class Kept:
    """What was injected so far, in a folder: a long bench can be run in parts."""

    def __init__(self, folder: Path, seconds: float):
        self.folder, self.last_s = folder, time.monotonic() + seconds
        self.lock, self.num_failed = threading.Lock(), 0
        path = folder / "results.json"
        self.results: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
        """By fault and number."""
        self.results.setdefault(MACHINES, {})[machine()] = 0

    def add(self, name: str, number: int, result: Any) -> None:
        with self.lock:
            self.results.setdefault(name, {})[str(number)] = result
            (self.folder / "results.json").write_text(json.dumps(self.results))

    def of(self, name: str) -> list[Any]:
        return [result for result in self.results.get(name, {}).values() if result]

    def has(self, name: str, number: int) -> bool:
        return str(number) in self.results.get(name, {})

    def merge(self, folder: Path) -> None:
        """Adds what was injected on another machine."""
        for name, results in json.loads((folder / "results.json").read_text()).items():
            self.results[name] = results | self.results.get(name, {})

    def expected(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / name / "run" / "model.safetensors")

    def train(self, name: str, plan: str, *more: str, has_hosts: bool = False) -> None:
        """Trains an undisturbed run, once."""
        if not (self.folder / name / "run" / "model.safetensors").exists():
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / name).mkdir()
            undisturbed(plan, self.folder / name, *more, has_hosts=has_hosts)


def tasks(kept: Kept, runs: int, only: str) -> Iterator[Callable[[], None]]:
    """Yields what is to be injected, every fault once before any a second time."""

    def is_due(name: str, number: int) -> bool:
        return only in name and not kept.has(name, number)

    def once(fault: Fault, number: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            luck = random.Random(f"{fault.name}/{number}")
            kept.add(fault.name, number, inject(fault, Path(folder), luck, kept.expected(fault.reference)))

    def changed(name: str, number: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            luck = random.Random(f"{name}/{number}")
            kept.add(name, number, change(name, Path(folder), luck, kept.expected(f"sgd-{CHANGE_STEPS[name]}")))

    def outlived(name: str, number: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            luck = random.Random(f"{PLAN}/{name}/{number}")
            kept.add(f"{PLAN}: {name}", number, lose_worker(name, Path(folder), luck))

    def elastic(number: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            luck = random.Random(f"elastic/{number}")
            found = lose_and_return(Path(folder), luck, kept.expected(f"sgd-{ELASTIC_STEPS}"))
            for name, result in zip(ELASTIC, found, strict=True):
                kept.add(name, number, result)

    for number in range(runs):
        for fault in FAULTS:
            if is_due(fault.name, number):
                yield lambda fault=fault, number=number: once(fault, number)  # type: ignore[misc]
        for name in CHANGE_STEPS:
            if is_due(name, number):
                yield lambda name=name, number=number: changed(name, number)  # type: ignore[misc]
        for name in SERVER_PHASES:
            if is_due(f"{PLAN}: {name}", number):
                yield lambda name=name, number=number: outlived(name, number)  # type: ignore[misc]
        if is_due(ELASTIC[1], number):
            yield lambda number=number: elastic(number)  # type: ignore[misc]


def train_references(kept: Kept) -> None:
    """Trains the undisturbed runs."""
    for plan in PLANS:
        kept.train(plan, plan)
    with suppress(NotHereError):
        kept.train("1f1b on two hosts", "1f1b", has_hosts=True)
    for steps in {*CHANGE_STEPS.values(), ELASTIC_STEPS}:
        kept.train(f"sgd-{steps}", "ddp", "--steps", str(steps), "--optimizer", "sgd")


def inject_all(kept: Kept, runs: int, kills: int, jobs: int, only: str) -> None:
    """Injects what has not been injected yet, as far as time allows."""
    if not only.startswith(PLAN):  # an audit needs no undisturbed run
        train_references(kept)

    def guarded(task: Callable[[], None]) -> None:
        if time.monotonic() > kept.last_s:
            return
        try:
            task()
        except NotHereError:
            pass
        except Exception:
            kept.num_failed += 1
            traceback.print_exc()

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(guarded, tasks(kept, runs, only)))
    if time.monotonic() < kept.last_s and only in ALONE and not kept.has(ALONE, 0):
        kept.add(ALONE, 0, list(checkpoints_alone(kills, random.Random(0))))


def describe(fault: Fault, results: Sequence[Result]) -> str:
    """Returns a row of the first table."""
    if not results:
        return f"| {fault.name} | {fault.plan} | 0 | – | – | – | – | – |"
    lost, again = [r.lost for r in results], [r.again_s for r in results if r.again_s]
    times = f"{median(again):.1f} s ({max(again):.1f} s)" if again else "–"
    claims = [[r.is_equal for r in results], [r.has_all_steps for r in results], [r.is_named for r in results]]
    counts = " | ".join(map(str, (len(results), *map(sum, claims))))
    return f"| {fault.name} | {fault.plan} | {counts} | {median(lost):g} ({max(lost)}) | {times} |"


def describe_change(name: str, results: Sequence[Changed]) -> str:
    """Returns a row of the second table."""
    if not results:
        return f"| {name} | 0 | – | – | – |"
    times = [result.without_step_s for result in results]
    counts = f"{len(results)} | {sum(result.has_all_steps for result in results)}"
    difference = max(result.difference for result in results)
    return f"| {name} | {counts} | {difference:.1g} | {median(times):.1f} s ({max(times):.1f} s) |"


def describe_outlived(name: str, results: Sequence[Outlived]) -> str:
    """Returns a row of the third table."""
    if not results:
        return f"| {name} | 0 | – | – | – | – |"
    claims = [[r.went_on for r in results], [r.has_all_steps for r in results], [r.is_named for r in results]]
    counts, times = " | ".join(map(str, (len(results), *map(sum, claims)))), [r.longest_s for r in results]
    return f"| {name} | {counts} | {median(times):.1f} s ({max(times):.1f} s) |"


def main() -> int:
    """Injects all and prints the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1, help="how many runs are disturbed at once")
    parser.add_argument("--keep", help="a folder for what was injected; start again with it to go on")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which nothing more is injected")
    parser.add_argument("--fork", action="store_true", help="begin runs with torch imported: a third of the time")
    parser.add_argument("--only", default="", help="a part of the names of the faults to inject")
    parser.add_argument("--also", type=Path, help="the --keep folder of another machine, to print with this one")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and the runs would inherit that
    if asked.fork:
        FORKS.append(ForkServer())
    with tempfile.TemporaryDirectory() as folder:
        kept = Kept(Path(asked.keep or folder), asked.seconds)
        kept.folder.mkdir(parents=True, exist_ok=True)
        inject_all(kept, asked.runs, asked.kills, asked.jobs, asked.only)
    if asked.also:
        kept.merge(asked.also)
    command = f"python bench/faults.py --runs {asked.runs} --kills {asked.kills} --jobs {asked.jobs}"
    sizes = {"steps": STEPS, "every": EVERY, "hang": HANG_S, "step": 1e3 * STEP_S, "jobs": asked.jobs}
    print(HEAD.format(command=command, machine=" and on ".join(kept.results[MACHINES]), **sizes))
    rows = {fault: [Result(*found) for found in kept.of(fault.name)] for fault in FAULTS}
    changes = {name: [Changed(*found) for found in kept.of(name)] for name in (*CHANGE_STEPS, *ELASTIC)}
    print(*(describe(fault, results) for fault, results in rows.items()), sep="\n")
    print(CHANGED.format(elastic=ELASTIC_STEPS))
    print(*(describe_change(name, results) for name, results in changes.items()), sep="\n")
    print(OUTLIVED.format(plan=PLAN, workers=WORKERS))
    outlived = {name: [Outlived(*found) for found in kept.of(f"{PLAN}: {name}")] for name in SERVER_PHASES}
    print(*(describe_outlived(name, results) for name, results in outlived.items()), sep="\n")
    print(
        f"\n## {ALONE}\n\n| fault | injected | result |\n|---|---|---|",
        *kept.results.get(ALONE, {}).get("0", ()),
        sep="\n",
    )
    is_sound = all(r.is_equal and r.has_all_steps and r.is_named for results in rows.values() for r in results)
    went_on = all(r.has_all_steps for results in changes.values() for r in results)
    is_outlived = all(r.went_on and r.has_all_steps and r.is_named for results in outlived.values() for r in results)
    return 0 if is_sound and went_on and is_outlived and not kept.num_failed else 1


if __name__ == "__main__":
    sys.exit(main())
