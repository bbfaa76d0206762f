"""Faults, injected one by one: what is left of a checkpoint, and whether runs go on to the weights they would have had.

    python bench/faults.py [--runs 3] [--kills 100] > docs/reliability.md

Runs are real processes and real signals. A worker is killed at a random call of a phase, by a patch that the worker
loads before it starts; the run then goes on with `--resume`. Every random choice has a seed.
"""

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from pipedejavu.cli.main import main as command_line
from pipedejavu.engine.apply import Applier
from pipedejavu.engine.handle import Handlers
from pipedejavu.engine.wire import ProcessWire
from pipedejavu.program import Action
from pipedejavu.store import Checkpoint, CheckpointError, Saver, Shelf
from pipedejavu.train import launch, worker

STEPS, EVERY = 30, 5
PLANS = {"1f1b": ("--microbatches", "2"), "ddp": ("--microbatches", "1")}
PHASES: dict[str, tuple[type, str, int]] = {
    "forward": (Handlers, "forward", 30),
    "backward": (Handlers, "backward", 30),
    "reduce": (ProcessWire, "add_up", 15),
    "send": (ProcessWire, "send", 30),
    "update": (Applier, "update", 15),
    "saving a part": (Saver, "_write_part", 3),
    "naming a checkpoint": (Shelf, "commit", 3),
}
"""Where a worker is killed: a method, and within how many of its calls."""


# In a worker that is to be killed.


def work(rank: int, size: int, path: str) -> None:
    """Runs a rank whose n-th call of a method is its last."""
    phase, killed, last = json.loads(os.environ["FAULT"])
    if phase in CHANGES:
        CHANGES[phase].patch(f"cpu{killed}", last)
        worker.work(rank, size, path)
    owner, name, _ = PHASES[phase]
    method, count = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*args, **kwargs)

    if rank == killed:
        setattr(owner, name, counted)
    worker.work(rank, size, path)


def run_faulty() -> None:
    """The command line, whose workers are those above."""
    launch.work = work
    command_line()


# Runs.


class Fault(NamedTuple):
    name: str
    plan: str
    start: Callable[["Attempt"], subprocess.Popen[str]]
    disturb: Callable[[subprocess.Popen[str], random.Random], None]
    code: int
    """What the disturbed run exits with."""


class Result(NamedTuple):
    is_equal: bool
    has_all_steps: bool
    is_named: bool
    lost: int
    again_s: float


class Attempt:
    """One run in a folder of its own."""

    def __init__(self, folder: Path, plan: str, fault: tuple[str, int, int] | None = None):
        self.folder, self.plan, self.fault = folder, plan, fault

    def start(self, *more: str, is_faulty: bool = False) -> subprocess.Popen[str]:
        root = Path(__file__).parents[1]
        paths = os.pathsep.join((str(root / "src"), str(root / "bench")))
        code = "import faults; faults.run_faulty()" if is_faulty else "from pipedejavu.cli.main import main; main()"
        sizes = ("--plan", f"preset:{self.plan}", "--workers", "2", "--samples", "3", *PLANS[self.plan])
        given = ("--data", "random:64", "--lr", "0.01", "--steps", str(STEPS), "--checkpoint-every", str(EVERY))
        return subprocess.Popen(
            [sys.executable, "-c", code, "train", "zoo:mlp", *given, *sizes, "--run-dir", "run", "--json", *more],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "FAULT": json.dumps(self.fault)},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / "run" / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def step(self) -> int:
        return max((row["step"] for row in self.rows() if "step" in row), default=0)

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "run" / "model.safetensors")


def killed_worker(phase: str, plan: str) -> Fault:
    return Fault(f"SIGKILL of a worker: {phase}", plan, lambda run: run.start(is_faulty=True), lambda *_: None, 1)


def signalled(name: str, send: Callable[[subprocess.Popen[str]], None], code: int) -> Fault:
    """A fault that comes from outside, at a moment of the training."""

    def disturb(process: subprocess.Popen[str], luck: random.Random) -> None:
        time.sleep(luck.uniform(0.0, 1.0))
        send(process)

    return Fault(name, "1f1b", lambda run: run.start(), disturb, code)


FAULTS = [
    *(killed_worker(phase, plan) for plan, phases in {
        "1f1b": ("forward", "backward", "send", "update", "saving a part", "naming a checkpoint"), "ddp": ("reduce",),
    }.items() for phase in phases),
    signalled("SIGKILL of the launcher", lambda process: process.kill(), -signal.SIGKILL),
    signalled("SIGKILL of everything", lambda process: os.killpg(process.pid, signal.SIGKILL), -signal.SIGKILL),
    signalled("SIGTERM", lambda process: process.terminate(), 143),
]  # fmt: skip


def inject(fault: Fault, folder: Path, luck: random.Random, expected: dict[str, torch.Tensor]) -> Result:
    """Disturbs a run, lets it go on, and compares what it ends with."""
    phase = fault.name.rpartition(": ")[2]
    aim = None
    if phase in PHASES:
        rank = 0 if phase == "naming a checkpoint" else luck.randrange(2)
        aim = (phase, rank, luck.randint(1, PHASES[phase][2]))
    run = Attempt(folder, fault.plan, aim)
    process = fault.start(run)
    while process.poll() is None and not run.step():
        time.sleep(0.02)
    fault.disturb(process, luck)
    _, err = process.communicate(timeout=120)
    reached, saved = run.step(), max(Shelf(folder / "run" / "checkpoints").steps(), default=0)
    is_named = process.returncode == fault.code and (fault.code < 0 or "pipedejavu: " in err)
    if process.returncode == 0:  # it was over before the fault came
        return Result(same(run.weights(), expected), True, True, 0, 0.0)
    begun_s = time.perf_counter()
    again = run.start("--resume")
    while again.poll() is None and not any("resumed" in row for row in run.rows()):  # until then the rows are older
        time.sleep(0.01)
    while again.poll() is None and run.step() <= saved:
        time.sleep(0.01)
    again_s = time.perf_counter() - begun_s
    _, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    steps = [row["step"] for row in run.rows() if "step" in row]
    has_all_steps = steps == list(range(1, STEPS + 1))
    return Result(same(run.weights(), expected), has_all_steps, is_named, max(0, reached - saved), again_s)


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def undisturbed(plan: str, folder: Path, *more: str) -> dict[str, torch.Tensor]:
    run = Attempt(folder, plan)
    process = run.start(*more)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return run.weights()


# Runs that change their plan.


def slow_down(device: str, step: int) -> None:
    """From a step on, every pass on a device takes 50 ms more."""
    do = Handlers.do

    def later(self: Handlers, a: Action) -> None:
        is_slow = self.program.devices[self.index] == device and self.first_version >= step
        time.sleep(0.05 if is_slow and a.kind in ("F", "B", "I", "W", "R") else 0.0)
        do(self, a)

    Handlers.do = later


def cap_memory(device: str, step: int) -> None:
    """At a step, a device turns out to have no room for a replica under the plan that the run begins with."""
    forward = Handlers.forward

    def capped(self: Handlers, a: Action) -> None:
        program = self.program
        if program.devices[self.index] == device and self.first_version == step and program.plan.name == "ddp":
            raise torch.OutOfMemoryError("the memory is capped")
        forward(self, a)

    Handlers.forward = capped


class Change(NamedTuple):
    patch: Callable[[str, int], None]
    steps: int
    more: tuple[str, ...]


CHANGES = {
    "a worker becomes slow, `--replan`": Change(slow_down, 300, ("--replan",)),
    "out of memory, `--on-oom replan`": Change(cap_memory, 30, ("--on-oom", "replan")),
}


def change(
    name: str, folder: Path, luck: random.Random, expected: dict[str, torch.Tensor]
) -> tuple[bool, float, float]:
    """Returns whether a run went on with each step once, its largest difference, and seconds without a step."""
    found, step = CHANGES[name], luck.randint(10, 20)
    run = Attempt(folder, "ddp", (name, luck.randrange(2), step))
    process = run.start("--steps", str(found.steps), "--optimizer", "sgd", *found.more, is_faulty=True)
    while process.poll() is None and not any("switched" in row for row in run.rows()):
        time.sleep(0.02)
    begun_s, saved = time.perf_counter(), next((row["switched"] for row in run.rows() if "switched" in row), 0)
    while process.poll() is None and run.step() <= saved:
        time.sleep(0.02)
    again_s = time.perf_counter() - begun_s
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    steps = [row["step"] for row in run.rows() if "step" in row]
    has_all_steps = steps == list(range(1, found.steps + 1)) and any("switched" in row for row in run.rows())
    weights = run.weights()
    return has_all_steps, max(float((weights[n] - w).abs().max()) for n, w in expected.items()), again_s


def describe_change(name: str, results: Sequence[tuple[bool, float, float]]) -> str:
    again = [result[2] for result in results]
    counts = f"{len(results)} | {sum(result[0] for result in results)}"
    return f"| {name} | {counts} | {max(r[1] for r in results):.1g} | {median(again):.1f} s ({max(again):.1f} s) |"


# Checkpoints alone.


def state(step: int) -> dict[str, torch.Tensor]:
    return {f"w{n}": torch.full((2**16,), float(step)) for n in range(16)}


def save(shelf: Shelf, step: int) -> None:
    saver = Saver(shelf, tell=lambda _: None)
    saver.save(step, state(step), lambda: {"samples": step})
    saver.wait()


def kill_while_saving(kills: int, luck: random.Random) -> tuple[int, int]:
    """Kills a process that saves without a pause; returns how often a whole checkpoint was there, and how many lost."""
    whole = lost = 0
    for _ in range(kills):
        with tempfile.TemporaryDirectory() as folder:
            shelf, done = Shelf(folder), os.pipe()
            save(shelf, 1)
            child = os.fork()
            if not child:
                for step in range(2, 10**6):
                    save(shelf, step)
                    os.write(done[1], step.to_bytes(4, "little"))
            time.sleep(luck.uniform(0.0, 0.2))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(done[1])
            with os.fdopen(done[0], "rb") as pipe:
                data = pipe.read()
            last = int.from_bytes(data[-4:], "little") if data else 1
            told: list[str] = []
            shelf.collect()
            found = shelf.newest(told.append)
            is_right = found is not None and not told and same(found.tensors(found.names()), state(found.step))
            whole += is_right
            lost += found is None or found.step < last
    return whole, lost


def damage(trials: int, luck: random.Random, change: Callable[[bytearray, random.Random], bytes]) -> int:
    """Damages any file of a checkpoint; returns how often that was noticed and the one before it used."""
    noticed = 0
    with tempfile.TemporaryDirectory() as folder:
        shelf = Shelf(folder)
        for step in (1, 2):
            saver = Saver(shelf, tell=lambda _: None)
            saver.save(step, {f"w{n}": torch.randn(50) for n in range(4)}, lambda: {"samples": 0})
            saver.wait()
        files = sorted(shelf.folder(2).iterdir())
        for _ in range(trials):
            path = luck.choice(files)
            whole = path.read_bytes()
            path.write_bytes(change(bytearray(whole), luck))
            try:
                Checkpoint(shelf.folder(2)).verify()
            except CheckpointError:
                noticed += 1
            path.write_bytes(whole)
        Checkpoint(shelf.folder(2)).verify()
    return noticed


def flip(data: bytearray, luck: random.Random) -> bytes:
    data[luck.randrange(len(data))] ^= 1 << luck.randrange(8)
    return bytes(data)


def cut_off(data: bytearray, luck: random.Random) -> bytes:
    return bytes(data[: luck.randrange(len(data))])


def fill_disk(trials: int, luck: random.Random) -> int | None:
    """Saves to a disk with too little room; returns how often the checkpoint before stayed whole and was said to."""
    kept = 0
    for _ in range(trials):
        folder = Path(tempfile.mkdtemp())
        size = luck.randint(9 * 2**20, 12 * 2**20)  # one checkpoint has 4 MiB; two fit, and a part of the third
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            return None
        try:
            shelf, told = Shelf(folder / "checkpoints"), []
            saver = Saver(shelf, tell=told.append)
            for step in (1, 2, 3):
                saver.save(step, state(step), lambda: {"samples": 0})
                saver.wait()
            found = shelf.newest(told.append)
            is_whole = found is not None and found.step == 2 and same(found.tensors(found.names()), state(2))
            is_clean = not list(shelf.path.glob("*.tmp")) and len(told) == 1 and "No space left" in told[0]
            kept += is_whole and is_clean
        finally:
            subprocess.run(["umount", str(folder)], check=True)
            folder.rmdir()
    return kept


# The page.

HEAD = """# Reliability

Made by `python bench/faults.py --runs {runs} --kills {kills}` on {machine}: real processes, real signals, every random
choice from a seed. [checkpoints.md](checkpoints.md) says how it works.

## Runs

`zoo:mlp` under AdamW, two workers, {steps} steps, a checkpoint every {every}. Each run is disturbed once, at a random
step, and goes on with `--resume` under the same plan. *Equal*: all weights have the bits of the run that nothing
happened to. *Every step*: the metrics hold each step once. *Named*: the exit code and a sentence say what happened.
*Lost*: steps that were trained again; an interval has {every}, and fewer than {every} more may pass while a checkpoint
is being written. *Training again*: seconds from the start of `--resume` to its first finished step, beside whatever
else the machine does; processes that start and import torch take most of it.

| fault | plan | injected | equal | every step | named | lost, median (most) | training again, median (most) |
|---|---|---|---|---|---|---|---|"""

CHANGED = """
## Runs that change their plan

The same model under SGD and `ddp`; at a random step one of the two workers becomes slow for good (50 ms more in each
pass, of 300 steps), or its device runs out of memory (30 steps). Nobody starts the run again: it goes on under another
plan from a checkpoint. *Went on*: to the end, each step once in the metrics. *Difference*: the largest of any weight to
the run that nothing happened to, in float32. *Without a step*: seconds between the end of the old plan and the first
step of the new one.

| fault | injected | went on | difference | without a step, median (most) |
|---|---|---|---|---|"""


def describe(fault: Fault, results: Sequence[Result]) -> str:
    lost, again = [r.lost for r in results], [r.again_s for r in results if r.again_s]
    times = f"{median(again):.1f} s ({max(again):.1f} s)" if again else "–"
    claims = [[r.is_equal for r in results], [r.has_all_steps for r in results], [r.is_named for r in results]]
    counts = " | ".join(map(str, (len(results), *map(sum, claims))))
    return f"| {fault.name} | {fault.plan} | {counts} | {median(lost):g} ({max(lost)}) | {times} |"


def change_all(runs: int, root: Path, luck: random.Random) -> None:
    """Prints what became of runs that change their plan."""
    print(CHANGED, flush=True)
    for name, found in CHANGES.items():
        whole = Path(tempfile.mkdtemp(dir=root))
        expected = undisturbed("ddp", whole, "--steps", str(found.steps), "--optimizer", "sgd")
        results = [change(name, Path(tempfile.mkdtemp(dir=root)), luck, expected) for _ in range(runs)]
        print(describe_change(name, results), flush=True)


def main() -> None:
    """Injects all and prints the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kills", type=int, default=100)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    luck, root = random.Random(0), Path(tempfile.mkdtemp())
    machine = f"{os.cpu_count()} cores of {platform.machine()}, torch {torch.__version__}"
    print(HEAD.format(runs=asked.runs, kills=asked.kills, machine=machine, steps=STEPS, every=EVERY), flush=True)
    try:
        expected = {}
        for plan in PLANS:
            (root / plan).mkdir()
            expected[plan] = undisturbed(plan, root / plan)
        for fault in FAULTS:
            results = []
            for _ in range(asked.runs):
                folder = Path(tempfile.mkdtemp(dir=root))
                results.append(inject(fault, folder, luck, expected[fault.plan]))
                shutil.rmtree(folder)
            print(describe(fault, results), flush=True)
        change_all(asked.runs, root, luck)
    finally:
        shutil.rmtree(root)
    print("\n## Checkpoints alone\n\n| fault | injected | result |\n|---|---|---|")
    whole, lost = kill_while_saving(asked.kills, luck)
    print(
        f"| SIGKILL while a process saves 4 MiB again and again | {asked.kills} | {whole} times the newest is whole;"
        f" {lost} finished checkpoints lost |"
    )
    print(f"| one bit flipped, in any file | {10 * asked.kills} | {damage(10 * asked.kills, luck, flip)} noticed |")
    print(f"| cut off, any file anywhere | {asked.kills} | {damage(asked.kills, luck, cut_off)} noticed |")
    kept = fill_disk(asked.kills // 5, luck)
    if kept is not None:
        print(f"| disk full while saving | {asked.kills // 5} | {kept} times the one before is whole, and said so |")


if __name__ == "__main__":
    main()
