"""How a worker fails: what it leaves for the process that started it, and what that one tells the user."""

import json
import signal
import traceback
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch._C._distributed_c10d import Store

from pipedejavu.facts import InputError

_LOST = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket Timeout", "Connection refused",
    "Connection timed out", "No route to host",
)  # fmt: skip
_KEY = "failure"


class WorkerError(Exception):
    """A worker failed for a reason that is not the user's input."""


class ShortageError(WorkerError):
    """A worker's device had no more memory; `found_bytes` are what it had got by then."""

    def __init__(self, worker: int, found_bytes: int, text: str = ""):
        super().__init__(text or f"worker {worker} ran out of memory")
        self.worker, self.found_bytes = worker, found_bytes


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that a device has no more memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def is_lost(error: BaseException) -> bool:
    """Whether an error only says that another worker is gone, whose own words say why."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST)


def write_failure(store: Store, rank: int, error: BaseException) -> None:
    """Keeps why a worker failed, unless another failed before it."""
    if is_lost(error):
        return
    if isinstance(error, ShortageError):
        text = f"memory\n{json.dumps([rank, error.found_bytes])}"
    elif isinstance(error, InputError):
        text = f"input\n{error}"
    elif isinstance(error, WorkerError):
        text = f"stopped\n{error}"
    else:
        lines = traceback.format_exception(error)
        text = f"raised\n{''.join(lines)}worker {rank} raised {type(error).__name__}; all others were stopped"
    keep_failure(store, text)


def keep_failure(store: Store, text: str) -> None:
    """Keeps a kind of failure and, in the lines after it, what to tell the user, unless another failed before."""
    store.compare_set(_KEY, "", text.encode("utf-8", "backslashreplace").decode())


def read_failure(store: Store, exit_codes: Sequence[int | None]) -> Exception:
    """Returns what to raise for workers that ended with these codes, by what the first of them left."""
    if store.check([_KEY]):
        kind, _, text = store.get(_KEY).decode("utf-8", "replace").partition("\n")
        if kind == "memory":
            with suppress(ValueError, TypeError, RecursionError):
                rank, found_bytes = json.loads(text)
                return ShortageError(int(rank), int(found_bytes))
        if text.strip():
            return InputError(text) if kind == "input" else WorkerError(text)
    for rank, code in enumerate(exit_codes):
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
            return WorkerError(f"worker {rank} was ended by {name}{hint}; all others were stopped")
    ended = ", ".join(f"worker {rank} with {code}" for rank, code in enumerate(exit_codes) if code)
    return WorkerError(f"workers ended without a reason: exit codes {ended}")


def with_rest(text: str, steps: Sequence[int]) -> str:
    """Returns what ended a run with the step that it goes on behind, the last of its checkpoints, if it has any."""
    return f"{text}; --resume goes on after step {steps[-1]}" if steps else text
