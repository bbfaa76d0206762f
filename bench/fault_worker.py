"""Faults inside a worker: the process that trains is patched so that one call of one method fails.

`FAULT` in the environment says what happens, as JSON: [phase, act, rank, call]. Nothing here starts a process.
"""

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipedejavu.cli.main import main as command_line
from pipedejavu.engine.applier import Applier
from pipedejavu.engine.handlers import Handlers
from pipedejavu.engine.rank_wire import RankWire
from pipedejavu.launch import launch, worker
from pipedejavu.program import Action, Value
from pipedejavu.source.task import SampleOrder
from pipedejavu.store import CheckpointDir, Saver

STEP_S = 0.05
"""The least time of a step in a disturbed run: one that is over at once has no middle."""
PHASES: dict[str, tuple[type, str, int]] = {
    "forward": (Handlers, "forward", 30),
    "backward": (Handlers, "backward", 30),
    "reduce": (RankWire, "add_up", 15),
    "send": (RankWire, "send", 30),
    "update": (Applier, "update", 15),
    "data": (SampleOrder, "inputs", 30),
    "saving a part": (Saver, "_write_shard", 3),
    "naming a checkpoint": (CheckpointDir, "commit", 3),
}
"""Where a fault happens in a worker: a method, and within how many of its calls."""


def _raise(*_: Any) -> None:
    raise RuntimeError("a fault of the user's code")


BEFORE: dict[str, Callable[[], Any]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "sleep": lambda: time.sleep(1e6),
    "sleep with the lock": lambda: ctypes.PyDLL(None).sleep(10**6),
    "raise": _raise,
}
"""What happens before the call."""


def _spoil_gradient(number: float) -> Callable[..., Any]:
    def spoil(result: Any, handlers: Handlers, action: Action) -> Any:
        update = action.microbatch // handlers.program.update_size
        gradients = handlers.values[Value.weight_gradient(action.piece, action.replica, update)]
        next(iter(gradients.values())).view(-1)[0] = number
        return result

    return spoil


def _flip_weight(result: Any, applier: Applier, action: Action) -> Any:
    """Flips the highest bit of the exponent of one weight, as a fault of the memory would."""
    weights = applier.values[Value.weights(action.piece, action.replica, action.version)]
    bits = next(iter(weights.values())).data.view(-1)[:1].view(torch.int32)
    bits ^= 1 << 29
    return result


AFTER: dict[str, Callable[..., Any]] = {
    "NaN": lambda result, *_: result * float("nan"),
    "Inf": lambda result, *_: result * float("inf"),
    "NaN in a gradient": _spoil_gradient(float("nan")),
    "Inf in a gradient": _spoil_gradient(float("inf")),
    "a bit of a weight": _flip_weight,
}
"""What happens to the result of the call; the arguments of the call follow it."""


def _slow_steps() -> None:
    """Makes every step take a while; the first rank counts its steps in the size of a file, one file per start."""
    if json.loads(os.environ["FAULT"])[0] in CHANGES:
        return
    after_round, name = worker.Rank.after_round, f"reached{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    folder = Path(os.environ["FAULT_FOLDER"])

    def later(self: worker.Rank, *args: Any) -> bool:
        time.sleep(STEP_S)
        if self.rank == 0:
            with (folder / name).open("ab") as file:
                file.write(b".")
        return after_round(self, *args)

    worker.Rank.after_round = later


def _patch(rank: int) -> None:
    """Lets the fault happen in the n-th call of its method, in one rank."""
    phase, act, chosen, last = json.loads(os.environ["FAULT"])
    if phase in CHANGES:
        CHANGES[phase](f"cpu{chosen}", last)
    if phase not in PHASES or rank != chosen:
        return
    owner, name, _ = PHASES[phase]
    method, count = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == last and act in BEFORE:
            BEFORE[act]()
        result = method(*args, **kwargs)
        return AFTER[act](result, *args) if count == last and act in AFTER else result

    setattr(owner, name, counted)


def slow_down(device: str, step: int) -> None:
    """Makes every pass on a device take 50 ms more, from a step on."""
    do = Handlers.do

    def later(self: Handlers, a: Action) -> None:
        is_slow = self.program.devices[self.index] == device and self.first_version >= step
        time.sleep(0.05 if is_slow and a.kind in ("F", "B", "I", "W", "R") else 0.0)
        do(self, a)

    Handlers.do = later


def cap_memory(device: str, step: int) -> None:
    """Lets a device run out of memory at a step, under the plan that the run begins with."""
    forward = Handlers.forward

    def capped(self: Handlers, a: Action) -> None:
        program = self.program
        if program.devices[self.index] == device and self.first_version == step and program.plan.name == "ddp":
            raise torch.OutOfMemoryError("the memory is capped")
        forward(self, a)

    Handlers.forward = capped


CHANGES = {"a worker becomes slow, `--replan`": slow_down, "out of memory, `--on-oom replan`": cap_memory}
"""Faults after which a run goes on under another plan, with their patches."""


def work(rank: int, *args: Any) -> None:
    """Runs a rank that may fail."""
    _slow_steps()
    _patch(rank)
    worker.work(rank, *args)


def run_faulty() -> None:
    """Runs the command line with the workers above; a rank of torchrun fails in the first attempt only."""
    launch.work = work
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        _slow_steps()
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        _patch(int(os.environ["RANK"]))
    command_line()
