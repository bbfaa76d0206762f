"""Training runs that are disturbed once, at a random moment, and go on: what happens, and what they end with."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from fault_checkpoint import cut_off, flip, same
from fault_fork import ForkedProcess, ForkServer
from fault_hosts import TORCHRUN, Hosts, two_hosts
from fault_worker import PHASES
from safetensors.torch import load_file

from pipedejavu.store import CheckpointDir

STEPS, EVERY = 30, 5
HANG_S = 10
FROZEN_S = 35
"""Longer than a write may take before it is told of."""
PLANS = {"1f1b": ("--microbatches", "2"), "ddp": ("--microbatches", "1")}
HANGS = ("sleep", "sleep with the lock", "SIGSTOP")
Process = subprocess.Popen[str] | ForkedProcess
FORKS: list[ForkServer] = []
"""Starts runs, if there is one."""


class NotHereError(Exception):
    """This machine cannot inject a fault: it has no namespaces, or mounts nothing."""


class Fault(NamedTuple):
    """What happens to a run: in a worker (`phase`, `act`), or from outside (`disturb`)."""

    name: str
    code: int
    """Exit code of the disturbed run; after 0 it needs no `--resume`."""
    plan: str = "1f1b"
    phase: str = ""
    act: str = ""
    disturb: Callable[["Attempt", Process, random.Random], None] = lambda *_: None
    says: str = "pipedejavu: "
    """What the disturbed run says, if it is not killed without a chance to say anything."""
    refusal: str = ""
    """What the first `--resume` says, which changes nothing and exits with 2; `repair` undoes its cause."""
    repair: Callable[["Attempt"], None] = lambda _: None
    """Called before `--resume`."""
    under_torchrun: bool = False
    disk: Literal["", "small", "own"] = ""
    """The run folder's disk: the machine's, one of 64 MiB, or a file system that can be frozen."""
    has_hosts: bool = False
    """Whether each of the two workers has a host of its own, with all its cores: sums have other bits than on one."""

    @property
    def reference(self) -> str:
        """The name of the undisturbed run that this one is compared with."""
        return f"{self.plan} on two hosts" if self.has_hosts else self.plan


class Result(NamedTuple):
    """What became of a disturbed run."""

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
        self.other: Process | None = None
        self.kept: dict[Path, bytes] = {}
        """Files before they were damaged, for `repair`."""

    @property
    def environment(self) -> dict[str, str]:
        root = Path(__file__).parents[1]
        known = os.environ.get("PYTHONPATH", "")
        paths = os.pathsep.join((str(root / "src"), str(root / "bench"), known))
        fault = {"FAULT": json.dumps(self.aim), "FAULT_FOLDER": str(self.folder)}
        return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **fault}

    def start(self, *more: str, is_faulty: bool = False) -> Process:
        plan = self.fault.plan
        code = (
            "import fault_worker as w; w.run_faulty()"
            if is_faulty
            else "from pipedejavu.cli.main import main as m; m()"
        )
        sizes = ("--plan", f"preset:{plan}", "--workers", "2", "--samples", "3", *PLANS.get(plan, ()))
        given = ("--data", "random:64", "--lr", "0.01", "--steps", str(STEPS), "--checkpoint-every", str(EVERY))
        start: tuple[str, ...] = (sys.executable, "-c", code)
        (self.folder / "start.py").write_text(code)
        if self.fault.under_torchrun or self.hosts:
            start = (*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "2", "start.py")
            more = (*more, "--resume")
        hang = ("--hang-after", str(HANG_S)) if self.fault.act in HANGS or self.hosts else ()
        train = ("train", "zoo:mlp", *given, *sizes, *hang, "--run-dir", "run", "--json", *more)
        if FORKS and start[:2] == (sys.executable, "-c"):
            return ForkedProcess(FORKS[0], code, [*train], self.folder, self.environment)
        if not self.hosts:
            return self._open((*start, *train))
        first, self.other = (
            self._open((*self.hosts.launcher(n), "start.py", *train), GLOO_SOCKET_IFNAME=name)
            for n, name in enumerate(self.hosts.names)
        )
        return first

    def _open(self, command: Sequence[str], **more: str) -> Process:
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment | more,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def finish(self, process: Process) -> str:
        """Waits for a run and all its processes, which keep its pipes; returns what it said, on its first host."""
        try:
            err = process.communicate(timeout=300)[1]
            if self.other:
                self.other.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        return err

    @property
    def path(self) -> Path:
        return self.folder / "run"

    @property
    def checkpoint_dir(self) -> CheckpointDir:
        return CheckpointDir(self.path / "checkpoints")

    def rows(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def step(self) -> int:
        return max((row["step"] for row in self.rows() if "step" in row), default=0)

    def reached(self) -> int:
        """Returns the steps that were made before the fault, also those that are not in the metrics."""
        path = self.folder / "reached0"
        return path.stat().st_size if path.exists() else 0

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.path / "model.safetensors")

    def contents(self) -> dict[str, bytes]:
        """Returns every file of the checkpoints, by name."""
        files = (path for path in self.checkpoint_dir.path.rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in files}


# What happens from outside.


def sent(send: Callable[[Process], None]) -> Callable[..., None]:
    """A signal that comes at a moment of the training."""

    def disturb(_: Attempt, process: Process, luck: random.Random) -> None:
        time.sleep(luck.uniform(0.0, 1.0))
        send(process)

    return disturb


def kill_all(process: Process) -> None:
    os.killpg(process.pid, signal.SIGKILL)


def orphan_stopped(process: Process) -> None:
    """Stops a worker, then kills the launcher, which cannot end it any more."""
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=False
    )
    os.kill(int(found.stdout.split()[-1]), signal.SIGSTOP)
    process.kill()


def damaged(change: Callable[[Attempt, Path, random.Random], None]) -> Callable[..., None]:
    """Everything is killed, and then the newest checkpoint is found changed."""

    def disturb(run: Attempt, process: Process, luck: random.Random) -> None:
        while process.poll() is None and len(run.checkpoint_dir.steps()) < 2:
            time.sleep(0.01)
        time.sleep(luck.uniform(0.0, 0.3))
        kill_all(process)
        process.wait()
        change(run, run.checkpoint_dir.folder(run.checkpoint_dir.steps()[-1]), luck)

    return disturb


def in_any_file(change: Callable[[bytearray, random.Random], bytes]) -> Callable[..., None]:
    def damage(_: Attempt, folder: Path, luck: random.Random) -> None:
        path = luck.choice(sorted(folder.iterdir()))
        path.write_bytes(change(bytearray(path.read_bytes()), luck))

    return damage


def swap_shards(_: Attempt, folder: Path, luck: random.Random) -> None:  # noqa: ARG001
    first, second = sorted(folder.glob("*.safetensors"))
    whole = first.read_bytes(), second.read_bytes()
    second.write_bytes(whole[0])
    first.write_bytes(whole[1])


def raise_schema(run: Attempt, folder: Path, luck: random.Random) -> None:
    """Gives the newest manifest the schema of a later version of this program, with the right hash."""
    path = folder / "manifest.json"
    run.kept[path] = path.read_bytes()
    _, _, rest = run.kept[path].partition(b"\n")
    rest = re.sub(rb'"schema_version": ?\d+', b'"schema_version": %d' % luck.randint(90, 99), rest)
    path.write_bytes(b'{"seal": "%s",\n' % sha256(rest).hexdigest().encode() + rest)


def flip_options(run: Attempt, _: Path, luck: random.Random) -> None:
    """Changes a digit of the options, which stay valid."""
    path = run.path / "options.json"
    text = path.read_bytes()
    place = luck.choice([m.start() for m in re.finditer(rb"(?<=[0-9])[0-9]", text)])
    path.write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])


def put_back(run: Attempt) -> None:
    for path, data in run.kept.items():
        path.write_bytes(data)


def fill(run: Attempt, luck: random.Random) -> Path:
    """Leaves no byte of the run folder's disk free; returns the file that takes them."""
    time.sleep(luck.uniform(0.0, 0.3))
    ballast = run.path / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**12))
    return ballast


def fill_for_a_while(run: Attempt, process: Process, luck: random.Random) -> None:
    """Fills the disk until a checkpoint could not be saved; rows of the metrics wait until there is room again."""
    ballast, before = fill(run, luck), run.reached()
    while process.poll() is None and run.reached() < min(STEPS, before + 2 * EVERY):
        time.sleep(0.01)
    ballast.unlink()


def fill_for_good(run: Attempt, process: Process, luck: random.Random) -> None:  # noqa: ARG001
    fill(run, luck)


def empty(run: Attempt) -> None:
    (run.path / "ballast").unlink()


def freeze(run: Attempt, _: Process, luck: random.Random) -> None:
    """Freezes the file system of the run folder: whatever writes there waits."""
    time.sleep(luck.uniform(0.0, 0.5))
    subprocess.run(["fsfreeze", "--freeze", str(run.path)], check=True)
    time.sleep(FROZEN_S)
    subprocess.run(["fsfreeze", "--unfreeze", str(run.path)], check=True)


def pull_the_cable(run: Attempt, _: Process, luck: random.Random) -> None:
    """Cuts the run's hosts off from each other."""
    assert run.hosts
    time.sleep(luck.uniform(0.0, 1.0))
    run.hosts.pull(luck.randrange(2))


def plug_in(run: Attempt) -> None:
    assert run.hosts
    for number in range(2):
        run.hosts.plug(number)


KILLED = -signal.SIGKILL
FAULTS = [
    *(Fault(f"SIGKILL of a worker: {phase}", 1, plan, phase, "SIGKILL") for plan, phases in {
        "1f1b": ("forward", "backward", "send", "update", "saving a part", "naming a checkpoint"), "ddp": ("reduce",),
    }.items() for phase in phases),
    Fault("SIGKILL of a rank of torchrun: update", 0, "ddp", "update", "SIGKILL", under_torchrun=True),
    Fault("SIGSEGV in a worker: backward", 1, "1f1b", "backward", "SIGSEGV"),
    Fault("a unit raises: forward", 1, "ddp", "forward", "raise"),
    Fault("SIGKILL of the launcher", KILLED, disturb=sent(lambda process: process.kill())),
    Fault("SIGKILL of the launcher, a worker stopped", KILLED, disturb=sent(orphan_stopped)),
    Fault("SIGKILL of everything", KILLED, disturb=sent(kill_all)),
    Fault("SIGTERM", 143, disturb=sent(lambda process: process.terminate())),
    Fault("SIGHUP", 129, disturb=sent(lambda process: process.send_signal(signal.SIGHUP))),
    Fault("a worker hangs in an action: forward", 1, "1f1b", "forward", "sleep"),
    Fault("a worker hangs in an action: update", 1, "ddp", "update", "sleep"),
    Fault("a worker keeps its interpreter to itself: forward", 1, "1f1b", "forward", "sleep with the lock"),
    Fault("a worker is stopped: backward", 1, "1f1b", "backward", "SIGSTOP"),
    Fault("a worker is stopped: reduce", 1, "ddp", "reduce", "SIGSTOP"),
    Fault("a rank of torchrun is stopped: forward", 0, "1f1b", "forward", "SIGSTOP", under_torchrun=True),
    Fault("NaN in the data", 2, "1f1b", "data", "NaN"),
    Fault("Inf in the data", 2, "ddp", "data", "Inf"),
    Fault("NaN in a gradient", 2, "1f1b", "backward", "NaN in a gradient"),
    Fault("Inf in a gradient", 2, "ddp", "backward", "Inf in a gradient"),
    Fault("a bit of a replica's weight flipped", 1, "ddp", "update", "a bit of a weight"),
    Fault("SIGKILL of everything, newest checkpoint cut off", KILLED, disturb=damaged(in_any_file(cut_off))),
    Fault("SIGKILL of everything, a bit of it flipped", KILLED, disturb=damaged(in_any_file(flip))),
    Fault("SIGKILL of everything, its shards swapped", KILLED, disturb=damaged(swap_shards)),
    Fault("SIGKILL of everything, its schema is newer", KILLED, disturb=damaged(raise_schema), refusal="schema version",
          repair=put_back),
    Fault("SIGKILL of everything, a digit of the options changed", KILLED, disturb=damaged(flip_options)),
    Fault("the network between two hosts is gone", 1, disturb=pull_the_cable, repair=plug_in, has_hosts=True),
    Fault("disk full for a while", 0, disturb=fill_for_a_while, says="No space left", disk="small"),
    Fault("disk full to the end", 74, disturb=fill_for_good, says="No space left", repair=empty, disk="small"),
    Fault(f"disk frozen for {FROZEN_S} s", 0, disturb=freeze, says="s so far", disk="own"),
]  # fmt: skip


def inject(fault: Fault, folder: Path, luck: random.Random, expected: dict[str, torch.Tensor]) -> Result:
    """Disturbs a run, lets it go on, and compares what it ends with; raises NotHereError if that is not possible."""
    aim = ("", "", 0, 0)
    if fault.phase:
        rank, most = luck.randrange(2), PHASES[fault.phase][2]
        rank = 0 if fault.phase in ("naming a checkpoint", "data") else rank
        aim = (fault.phase, fault.act, rank, luck.randint(most // 2 if fault.under_torchrun else 1, most))
    run = Attempt(folder, fault, aim)
    with ExitStack() as stack:
        if fault.has_hosts:
            run.hosts = stack.enter_context(two_hosts())
            if run.hosts is None:
                raise NotHereError
        if fault.disk:
            stack.enter_context(_disk(run))
        return _injected(run, luck, expected)


@contextmanager
def _disk(run: Attempt) -> Iterator[None]:
    """Gives the run folder a file system of its own."""
    image = run.folder / "disk"
    mount: list[str] = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(run.path)]
    if run.fault.disk == "own":
        with image.open("wb") as file:
            file.truncate(128 * 2**20)
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
        mount = ["mount", "-o", "loop", str(image), str(run.path)]
    run.path.mkdir()
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        raise NotHereError
    try:
        yield
    finally:
        subprocess.run(["umount", str(run.path)], check=True)


def _injected(run: Attempt, luck: random.Random, expected: dict[str, torch.Tensor]) -> Result:
    fault = run.fault
    process = run.start(is_faulty=True)
    while process.poll() is None and not run.step():
        time.sleep(0.02)
    fault.disturb(run, process, luck)
    again_s = _train_again_s(run, process, is_by_itself=True) if fault.under_torchrun else 0.0
    err = run.finish(process)
    is_named = process.returncode == fault.code and (fault.code < 0 or fault.says in err)
    if not is_named:
        print(f"{fault.name}: exit code {process.returncode} instead of {fault.code}\n{err}", file=sys.stderr)
    if process.returncode:
        if fault.refusal:
            is_named = is_named and _is_refused(run)
        fault.repair(run)
        again = run.start("--resume")
        again_s = _train_again_s(run, again, is_by_itself=False)
        err = run.finish(again)
        assert again.returncode == 0, err
    resumed = max((row["resumed"] for row in run.rows() if "resumed" in row), default=0)
    lost = run.reached() - resumed if process.returncode or fault.under_torchrun else 0
    has_all_steps = [row["step"] for row in run.rows() if "step" in row] == [*range(1, STEPS + 1)]
    return Result(same(run.weights(), expected), has_all_steps, is_named, lost, again_s)


def _is_refused(run: Attempt) -> bool:
    """Whether `--resume` says why it does not go on, and leaves all checkpoints as they are."""
    before = run.contents()
    again = run.start("--resume")
    err = run.finish(again)
    return again.returncode == 2 and run.fault.refusal in err and run.contents() == before


def _train_again_s(run: Attempt, process: Process, is_by_itself: bool) -> float:
    """Waits for the first step after the checkpoint that a run goes on from; returns how long that took.

    It counts from the start of the process or, if the run goes on by itself, from the last step before.
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


def undisturbed(plan: str, folder: Path, *more: str, has_hosts: bool = False) -> None:
    """Trains without a fault; raises NotHereError if that takes two hosts and there are none."""
    run = Attempt(folder, Fault("none", 0, plan))
    with ExitStack() as stack:
        if has_hosts:
            run.hosts = stack.enter_context(two_hosts())
            if run.hosts is None:
                raise NotHereError
        process = run.start(*more)
        err = run.finish(process)
    assert process.returncode == 0, err
