"""Faults, injected one by one: what is left of a checkpoint, and whether runs go on to the weights they would have had.

    python bench/faults.py [--runs 3] [--kills 100] > docs/reliability.md
    python bench/faults.py --keep FOLDER --seconds 200     # a part of it; the same again goes on

Runs are real processes and real signals. What happens to a worker happens at a random call of a phase, by a patch that
the worker loads before it starts; the run then goes on with `--resume`. Every random choice has a seed.
"""

import argparse
import ctypes
import itertools
import json
import math
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from faults_hosts import TORCHRUN, Agents, Hosts, kill_tree, two_hosts
from safetensors.torch import load_file

from pipedejavu.cli.main import main as command_line
from pipedejavu.engine.apply import Applier
from pipedejavu.engine.handle import Handlers
from pipedejavu.engine.wire import ProcessWire
from pipedejavu.program import Action
from pipedejavu.store import Checkpoint, CheckpointError, Saver, Shelf
from pipedejavu.train import launch, worker
from pipedejavu.train.task import SampleOrder

STEPS, EVERY = 30, 5
HANG_S = 10
STEP_S = 0.05
"""What a step is made to take at least in a run that is disturbed: one that is over at once has no middle."""
PLANS = {"1f1b": ("--microbatches", "2"), "ddp": ("--microbatches", "1")}
PHASES: dict[str, tuple[type, str, int]] = {
    "forward": (Handlers, "forward", 30),
    "backward": (Handlers, "backward", 30),
    "reduce": (ProcessWire, "add_up", 15),
    "send": (ProcessWire, "send", 30),
    "update": (Applier, "update", 15),
    "data": (SampleOrder, "inputs", 30),
    "saving a part": (Saver, "_write_part", 3),
    "naming a checkpoint": (Shelf, "commit", 3),
}
"""Where a fault happens in a worker: a method, and within how many of its calls."""
ACTS: dict[str, Callable[[Any], Any]] = {
    "SIGKILL": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "SIGSEGV": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "sleep": lambda _: time.sleep(1e6),
    "sleep with the lock": lambda _: ctypes.PyDLL(None).sleep(10**6),
    "raise": lambda _: _raise(),
    "NaN": lambda x: x * float("nan"),
    "Inf": lambda x: x * float("inf"),
}
"""What happens there; what a method has returned may change."""
HANGS = ("sleep", "sleep with the lock", "SIGSTOP")


def _raise() -> None:
    raise RuntimeError("a fault of the user's code")


# In a worker that is to fail.


def slow_steps() -> None:
    """Lets every step take a while, and the first rank count them in the size of a file, of each start its own."""
    if json.loads(os.environ["FAULT"])[0] in CHANGES:
        return
    after_round, name = worker.Rank.after_round, f"reached{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def later(self: worker.Rank, *args: Any) -> bool:
        time.sleep(STEP_S)
        if self.rank == 0:
            with Path(name).open("ab") as file:
                file.write(b".")
        return after_round(self, *args)

    worker.Rank.after_round = later


def patch(rank: int) -> None:
    """Lets something happen in the n-th call of a method, in one rank."""
    phase, act, chosen, last = json.loads(os.environ["FAULT"])
    if not phase:
        return
    if phase in CHANGES:
        CHANGES[phase].patch(f"cpu{chosen}", last)
        return
    owner, name, _ = PHASES[phase]
    method, count = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == last and act not in ("NaN", "Inf"):
            ACTS[act](None)
        found = method(*args, **kwargs)
        return ACTS[act](found) if count == last else found

    if rank == chosen:
        setattr(owner, name, counted)


def work(rank: int, size: int, path: str) -> None:
    """Runs a rank that may fail."""
    slow_steps()
    patch(rank)
    worker.work(rank, size, path)


def run_faulty() -> None:
    """The command line, whose workers are those above; as a rank of torchrun it fails in the first attempt only."""
    launch.work = work
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        slow_steps()
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        patch(int(os.environ["RANK"]))
    command_line()


# Runs.


class Fault(NamedTuple):
    """What happens to a run: in a worker (`phase`, `act`), or from outside."""

    name: str
    code: int
    """What the disturbed run exits with; 0 goes on by itself."""
    plan: str = "1f1b"
    phase: str = ""
    act: str = ""
    disturb: Callable[["Attempt", subprocess.Popen[str], random.Random], None] = lambda *_: None
    under_torchrun: bool = False
    has_small_disk: bool = False
    has_hosts: bool = False
    """Whether each of the two workers has a host of its own."""


class Result(NamedTuple):
    is_equal: bool
    has_all_steps: bool
    is_named: bool
    lost: int
    again_s: float


class Attempt:
    """One run in a folder of its own."""

    def __init__(self, folder: Path, fault: Fault, aim: tuple[str, str, int, int] = ("", "", 0, 0)):
        self.folder, self.fault, self.aim = folder, fault, aim
        self.hosts: Hosts | None = None
        self.other: subprocess.Popen[str] | None = None

    @property
    def environment(self) -> dict[str, str]:
        root = Path(__file__).parents[1]
        paths = os.pathsep.join((str(root / "src"), str(root / "bench")))
        return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "FAULT": json.dumps(self.aim)}

    def start(self, *more: str, is_faulty: bool = False) -> subprocess.Popen[str]:
        plan = self.fault.plan
        code = "import faults; faults.run_faulty()" if is_faulty else "from pipedejavu.cli.main import main; main()"
        sizes = ("--plan", f"preset:{plan}", "--workers", "2", "--samples", "3", *PLANS[plan])
        given = ("--data", "random:64", "--lr", "0.01", "--steps", str(STEPS), "--checkpoint-every", str(EVERY))
        start: tuple[str, ...] = (sys.executable, "-c", code)
        (self.folder / "start.py").write_text(code)
        if self.fault.under_torchrun or self.hosts:
            start = (*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "2", "start.py")
            more = (*more, "--resume")
        hang = ("--hang-after", str(HANG_S)) if self.fault.act in HANGS or self.hosts else ()
        train = ("train", "zoo:mlp", *given, *sizes, *hang, "--run-dir", "run", "--json", *more)
        if not self.hosts:
            return self._open((*start, *train))
        first, self.other = (
            self._open((*self.hosts.launcher(n), "start.py", *train), GLOO_SOCKET_IFNAME=name)
            for n, name in enumerate(self.hosts.names)
        )
        return first

    def _open(self, command: Sequence[str], **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment | more,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def finish(self, process: subprocess.Popen[str]) -> str:
        """Waits for a run; returns what it said, on its first host where it has two."""
        err = process.communicate(timeout=300)[1]
        if self.other:
            self.other.communicate(timeout=300)
        return err

    @property
    def shelf(self) -> Shelf:
        return Shelf(self.folder / "run" / "checkpoints")

    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / "run" / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def step(self) -> int:
        return max((row["step"] for row in self.rows() if "step" in row), default=0)

    def reached(self) -> int:
        """Returns the steps that were made before the fault, also those that nobody was told of."""
        path = self.folder / "reached0"
        return path.stat().st_size if path.exists() else 0

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "run" / "model.safetensors")


def sent(send: Callable[[subprocess.Popen[str]], None]) -> Callable[..., None]:
    """A signal that comes from outside, at a moment of the training."""

    def disturb(_: Attempt, process: subprocess.Popen[str], luck: random.Random) -> None:
        time.sleep(luck.uniform(0.0, 1.0))
        send(process)

    return disturb


def kill_all(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)


def flip(data: bytearray, luck: random.Random) -> bytes:
    data[luck.randrange(len(data))] ^= 1 << luck.randrange(8)
    return bytes(data)


def cut_off(data: bytearray, luck: random.Random) -> bytes:
    return bytes(data[: luck.randrange(len(data))])


def damaged(change: Callable[[bytearray, random.Random], bytes]) -> Callable[..., None]:
    """Everything is killed, and then a file of the newest checkpoint is found changed."""

    def disturb(run: Attempt, process: subprocess.Popen[str], luck: random.Random) -> None:
        while process.poll() is None and len(run.shelf.steps()) < 2:
            time.sleep(0.01)
        time.sleep(luck.uniform(0.0, 0.3))
        kill_all(process)
        process.wait()
        path = luck.choice(sorted(run.shelf.folder(run.shelf.steps()[-1]).iterdir()))
        path.write_bytes(change(bytearray(path.read_bytes()), luck))

    return disturb


def fill_for_a_while(run: Attempt, process: subprocess.Popen[str], luck: random.Random) -> None:
    """Fills the disk of the checkpoints until one could not be saved."""
    time.sleep(luck.uniform(0.0, 0.3))
    ballast = run.shelf.path / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))
    while process.poll() is None and not any("not_saved" in row for row in run.rows()):
        time.sleep(0.01)
    ballast.unlink()


def pull_the_cable(run: Attempt, _: subprocess.Popen[str], luck: random.Random) -> None:
    """Cuts the run's hosts off from each other."""
    assert run.hosts
    time.sleep(luck.uniform(0.0, 1.0))
    run.hosts.pull(luck.randrange(2))


FAULTS = [
    *(Fault(f"SIGKILL of a worker: {phase}", 1, plan, phase, "SIGKILL") for plan, phases in {
        "1f1b": ("forward", "backward", "send", "update", "saving a part", "naming a checkpoint"), "ddp": ("reduce",),
    }.items() for phase in phases),
    Fault("SIGKILL of a rank of torchrun: update", 0, "ddp", "update", "SIGKILL", under_torchrun=True),
    Fault("SIGSEGV in a worker: backward", 1, "1f1b", "backward", "SIGSEGV"),
    Fault("a unit raises: forward", 1, "ddp", "forward", "raise"),
    Fault("SIGKILL of the launcher", -signal.SIGKILL, disturb=sent(lambda process: process.kill())),
    Fault("SIGKILL of everything", -signal.SIGKILL, disturb=sent(kill_all)),
    Fault("SIGTERM", 143, disturb=sent(lambda process: process.terminate())),
    Fault("a worker hangs in an action: forward", 1, "1f1b", "forward", "sleep"),
    Fault("a worker hangs in an action: update", 1, "ddp", "update", "sleep"),
    Fault("a worker keeps its interpreter to itself: forward", 1, "1f1b", "forward", "sleep with the lock"),
    Fault("a worker is stopped: backward", 1, "1f1b", "backward", "SIGSTOP"),
    Fault("a worker is stopped: reduce", 1, "ddp", "reduce", "SIGSTOP"),
    Fault("a rank of torchrun is stopped: forward", 0, "1f1b", "forward", "SIGSTOP", under_torchrun=True),
    Fault("NaN in the data", 2, "1f1b", "data", "NaN"),
    Fault("Inf in the data", 2, "ddp", "data", "Inf"),
    Fault("SIGKILL of everything, newest checkpoint cut off", -signal.SIGKILL, disturb=damaged(cut_off)),
    Fault("SIGKILL of everything, a bit of it flipped", -signal.SIGKILL, disturb=damaged(flip)),
    Fault("the network between two hosts is gone", 1, disturb=pull_the_cable, has_hosts=True),
    Fault("disk full for a while", 0, disturb=fill_for_a_while, has_small_disk=True),
]  # fmt: skip


def inject(fault: Fault, folder: Path, luck: random.Random, expected: dict[str, torch.Tensor]) -> Result | None:
    """Disturbs a run, lets it go on, and compares what it ends with; returns None where that is not possible here."""
    aim = ("", "", 0, 0)
    if fault.phase:
        rank, most = luck.randrange(2), PHASES[fault.phase][2]
        rank = 0 if fault.phase in ("naming a checkpoint", "data") else rank
        aim = (fault.phase, fault.act, rank, luck.randint(most // 2 if fault.under_torchrun else 1, most))
    run = Attempt(folder, fault, aim)
    if fault.has_hosts:
        with two_hosts() as run.hosts:
            return _injected(run, luck, expected) if run.hosts else None
    if not fault.has_small_disk:
        return _injected(run, luck, expected)
    run.shelf.path.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(run.shelf.path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        return None
    try:
        return _injected(run, luck, expected)
    finally:
        subprocess.run(["umount", str(run.shelf.path)], check=True)


def _injected(run: Attempt, luck: random.Random, expected: dict[str, torch.Tensor]) -> Result:
    fault = run.fault
    process = run.start(is_faulty=True)
    while process.poll() is None and not run.step():
        time.sleep(0.02)
    fault.disturb(run, process, luck)
    again_s = _train_again_s(run, process, is_by_itself=True) if fault.under_torchrun else 0.0
    err = run.finish(process)
    is_named = process.returncode == fault.code and (fault.code < 0 or "pipedejavu: " in err)
    if process.returncode:
        for number in range(2 if run.hosts else 0):
            run.hosts.plug(number)
        again = run.start("--resume")
        again_s = _train_again_s(run, again, is_by_itself=False)
        err = run.finish(again)
        assert again.returncode == 0, err
    resumed = max((row["resumed"] for row in run.rows() if "resumed" in row), default=0)
    lost = run.reached() - resumed if process.returncode or fault.under_torchrun else 0
    has_all_steps = [row["step"] for row in run.rows() if "step" in row] == [*range(1, STEPS + 1)]
    return Result(same(run.weights(), expected), has_all_steps, is_named, lost, again_s)


def _train_again_s(run: Attempt, process: subprocess.Popen[str], is_by_itself: bool) -> float:
    """Waits for the first step behind the checkpoint that a run goes on from; returns how long that took.

    From the start of the process or, where the run goes on by itself, from the last step before.
    """
    begun_s, last = time.perf_counter(), run.step()
    while process.poll() is None:
        rows = run.rows()
        starts = [n for n, row in enumerate(rows) if "resumed" in row]
        if starts and any("step" in row for row in rows[starts[-1] :]):
            break
        if is_by_itself and not starts and run.step() > last:
            begun_s, last = time.perf_counter(), run.step()
        time.sleep(0.01)
    return time.perf_counter() - begun_s


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def undisturbed(plan: str, folder: Path, *more: str) -> None:
    run = Attempt(folder, Fault("none", 0, plan))
    process = run.start(*more)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err


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


def is_training_again(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether a step was made under the plan that the run has switched to last."""
    kinds = [kind for row in rows for kind in ("switched", "resumed", "step") if kind in row]
    behind = kinds[len(kinds) - kinds[::-1].index("switched") :] if "switched" in kinds else []
    return "step" in behind[behind.index("resumed") :] if "resumed" in behind else False


def change(
    name: str, folder: Path, luck: random.Random, expected: dict[str, torch.Tensor]
) -> tuple[bool, float, float]:
    """Returns whether a run went on with each step once, its largest difference, and seconds without a step."""
    found, step = CHANGES[name], luck.randint(10, 20)
    run = Attempt(folder, Fault(name, 0, "ddp"), (name, "", luck.randrange(2), step))
    process = run.start("--steps", str(found.steps), "--optimizer", "sgd", *found.more, is_faulty=True)
    while process.poll() is None and not any("switched" in row for row in run.rows()):
        time.sleep(0.02)
    begun_s = time.perf_counter()
    while process.poll() is None and not is_training_again(run.rows()):
        time.sleep(0.02)
    again_s = time.perf_counter() - begun_s
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    steps = [row["step"] for row in run.rows() if "step" in row]
    has_all_steps = steps == list(range(1, found.steps + 1)) and any("switched" in row for row in run.rows())
    weights = run.weights()
    return has_all_steps, max(float((weights[n] - w).abs().max()) for n, w in expected.items()), again_s


def describe_change(name: str, results: Sequence[tuple[bool, float, float]]) -> str:
    if not results:
        return f"| {name} | 0 | – | – | – |"
    again = [result[2] for result in results]
    counts = f"{len(results)} | {sum(result[0] for result in results)}"
    return f"| {name} | {counts} | {max(r[1] for r in results):.1g} | {median(again):.1f} s ({max(again):.1f} s) |"


ELASTIC = ("one of two hosts is lost for good, `torchrun`", "a second host joins, `torchrun`")
ELASTIC_STEPS = 200


def lose_and_return(
    folder: Path, luck: random.Random, expected: dict[str, torch.Tensor]
) -> list[tuple[bool, float, float]]:
    """Lets a run of two agents lose one, go on alone, and get another; returns what `change` does, for both."""
    run = Attempt(folder, Fault("elastic", 0, "ddp"))
    (folder / "start.py").write_text("import faults; faults.run_faulty()")
    given = ("--data", "random:64", "--optimizer", "sgd", "--lr", "0.01", "--samples", "3", "--checkpoint-every", "10")
    more = ("--plan", "auto", "--no-replan", "--steps", str(ELASTIC_STEPS), "--run-dir", "run", "--resume")
    agents = Agents(folder, ("start.py", "train", "zoo:mlp", *given, *more), run.environment)
    times_s = []

    def wait_for(what: str, least: int) -> int:
        while not any(row.get(what, -1) >= least for row in run.rows()):
            assert first.poll() is None, first.communicate()
            time.sleep(0.02)
        return int(max(row.get(what, -1) for row in run.rows()))

    try:
        first = agents.start()
        time.sleep(2)  # so that the first keeps the meeting place
        second, at = agents.start(), luck.randint(10, 60)
        wait_for("saved", 10)
        wait_for("step", at)
        for disturb in (lambda: kill_tree(second.pid), agents.start):
            known = sum("switched" in row for row in run.rows())
            begun_s = time.perf_counter()
            disturb()
            while sum("switched" in row for row in run.rows()) == known:
                assert first.poll() is None, first.communicate()
                time.sleep(0.02)
            while not is_training_again(run.rows()):
                assert first.poll() is None, first.communicate()
                time.sleep(0.02)
            times_s.append(time.perf_counter() - begun_s)
            behind = [row["switched"] for row in run.rows() if "switched" in row][-1]
            wait_for("saved", behind + 1)
        err = [agent.communicate(timeout=300)[1] for agent in (first, agents.started[-1])]
        assert [first.returncode, agents.started[-1].returncode] == [0, 0], err
    finally:
        agents.end()
    has_all_steps = [row["step"] for row in run.rows() if "step" in row] == [*range(1, ELASTIC_STEPS + 1)]
    weights = run.weights()
    difference = max(float((weights[n] - w).abs().max()) for n, w in expected.items())
    return [(has_all_steps, difference, time_s) for time_s in times_s]


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

`zoo:mlp` under AdamW, two workers, {steps} steps of {step:.0f} ms or more, a checkpoint every {every}. Each run is
disturbed once, at a random step, and goes on with `--resume` under the same plan; under `torchrun` it does by itself.
Two hosts are network namespaces with a cable between them. *Equal*: all weights have the bits of the run that nothing
happened to. *Every step*: the metrics hold each step once. *Named*: the exit code and a sentence say what happened.
*Lost*: steps that were trained again; an interval has {every}, and fewer than {every} more may pass while a checkpoint
is being written; where the newest one was damaged, an interval more. *Training again*: seconds from the start of
`--resume` to its first finished step, under `torchrun` from the last step before the fault, beside whatever else the
machine does; processes that start and import torch take most of it. Workers hang after {hang} s here (`--hang-after`).

| fault | plan | injected | equal | every step | named | lost, median (most) | training again, median (most) |
|---|---|---|---|---|---|---|---|"""

CHANGED = """
## Runs that change their plan

The same model under SGD and `ddp`; at a random step one of the two workers becomes slow for good (50 ms more in each
pass, of 300 steps), or its device runs out of memory (30 steps); or of two hosts, each with an agent of `torchrun`,
one is killed for good, and later another comes (`--plan auto`, {elastic} steps). Nobody starts the run again: it goes
on under another plan from a checkpoint. *Went on*: to the end, each step once in the metrics. *Difference*: the largest
of any weight to the run that nothing happened to, in float32. *Without a step*: seconds between the end of the old plan
and the first step of the new one; for hosts from when one is killed or started, with the 5 s that `torchrun` waits for
others.

| fault | injected | went on | difference | without a step, median (most) |
|---|---|---|---|---|"""


def describe(fault: Fault, results: Sequence[Result]) -> str:
    if not results:
        return f"| {fault.name} | {fault.plan} | 0 | – | – | – | – | – |"
    lost, again = [r.lost for r in results], [r.again_s for r in results if r.again_s]
    times = f"{median(again):.1f} s ({max(again):.1f} s)" if again else "–"
    claims = [[r.is_equal for r in results], [r.has_all_steps for r in results], [r.is_named for r in results]]
    counts = " | ".join(map(str, (len(results), *map(sum, claims))))
    return f"| {fault.name} | {fault.plan} | {counts} | {median(lost):g} ({max(lost)}) | {times} |"


class Kept:
    """What was injected so far, in a folder: a long bench can be run in parts."""

    def __init__(self, folder: Path, seconds: float):
        self.folder, self.last_s = folder, time.monotonic() + seconds
        path = folder / "results.json"
        self.results: dict[str, list[Any]] = json.loads(path.read_text()) if path.exists() else {}

    @property
    def has_time(self) -> bool:
        return time.monotonic() < self.last_s

    def add(self, name: str, result: Any) -> None:
        self.results.setdefault(name, []).append(result)
        (self.folder / "results.json").write_text(json.dumps(self.results))

    def of(self, fault: Fault) -> list[Result]:
        return [Result(*found) for found in self.results.get(fault.name, ()) if found]


def inject_all(kept: Kept, runs: int, kills: int) -> None:
    """Injects what has not been injected yet, as far as time allows."""
    for plan in PLANS:
        known = kept.folder / plan / "run" / "model.safetensors"
        if not known.exists():
            shutil.rmtree(kept.folder / plan, ignore_errors=True)
            (kept.folder / plan).mkdir()
            undisturbed(plan, kept.folder / plan)
    for number, fault in itertools.product(range(runs), FAULTS):
        if kept.has_time and len(kept.results.get(fault.name, ())) <= number:
            expected = load_file(kept.folder / fault.plan / "run" / "model.safetensors")
            with tempfile.TemporaryDirectory() as folder:
                kept.add(fault.name, inject(fault, Path(folder), random.Random(f"{fault.name}/{number}"), expected))
    for number, (name, found) in itertools.product(range(runs), CHANGES.items()):
        if kept.has_time and len(kept.results.get(name, ())) <= number:
            with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as folder:
                undisturbed("ddp", Path(whole), "--steps", str(found.steps), "--optimizer", "sgd")
                expected = load_file(Path(whole) / "run" / "model.safetensors")
                kept.add(name, change(name, Path(folder), random.Random(f"{name}/{number}"), expected))
    for number in range(runs):
        if kept.has_time and len(kept.results.get(ELASTIC[0], ())) <= number:
            with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as folder:
                undisturbed("ddp", Path(whole), "--steps", str(ELASTIC_STEPS), "--optimizer", "sgd")
                expected = load_file(Path(whole) / "run" / "model.safetensors")
                found = lose_and_return(Path(folder), random.Random(f"elastic/{number}"), expected)
                for name, result in zip(ELASTIC, found, strict=True):
                    kept.add(name, result)
    if kept.has_time and ALONE not in kept.results:
        for row in checkpoints_alone(kills, random.Random(0)):
            kept.add(ALONE, row)


ALONE = "Checkpoints alone"


def checkpoints_alone(kills: int, luck: random.Random) -> Iterator[str]:
    """Yields rows of the table of faults that need no run."""
    whole, lost = kill_while_saving(kills, luck)
    yield (
        f"| SIGKILL while a process saves 4 MiB again and again | {kills} | {whole} times the newest is whole;"
        f" {lost} finished checkpoints lost |"
    )
    yield f"| one bit flipped, in any file | {10 * kills} | {damage(10 * kills, luck, flip)} noticed |"
    yield f"| cut off, any file anywhere | {kills} | {damage(kills, luck, cut_off)} noticed |"
    kept = fill_disk(kills // 5, luck)
    if kept is not None:
        yield f"| disk full while saving | {kills // 5} | {kept} times the one before is whole, and said so |"


def main() -> None:
    """Injects all and prints the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--keep", help="a folder for what was injected; start again with it to go on")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which nothing more is injected")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        kept = Kept(Path(asked.keep or folder), asked.seconds)
        kept.folder.mkdir(parents=True, exist_ok=True)
        inject_all(kept, asked.runs, asked.kills)
    machine = f"{os.cpu_count()} cores of {platform.machine()}, torch {torch.__version__}"
    sizes = {"steps": STEPS, "every": EVERY, "hang": HANG_S, "step": 1e3 * STEP_S}
    print(HEAD.format(runs=asked.runs, kills=asked.kills, machine=machine, **sizes))
    for fault in FAULTS:
        print(describe(fault, kept.of(fault)))
    print(CHANGED.format(elastic=ELASTIC_STEPS))
    for name in (*CHANGES, *ELASTIC):
        print(describe_change(name, kept.results.get(name, ())))
    print(f"\n## {ALONE}\n\n| fault | injected | result |\n|---|---|---|", *kept.results.get(ALONE, ()), sep="\n")


if __name__ == "__main__":
    main()
