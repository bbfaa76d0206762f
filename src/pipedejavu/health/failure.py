"""Failures of workers: how a worker reports one to the process that started it, and the error for the user."""

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
    """A worker failed for a reason other than invalid input."""


class ShortageError(WorkerError):
    """A worker's device ran out of memory after allocating `found_bytes`."""

    def __init__(self, worker: int, found_bytes: int, text: str = ""):
        super().__init__(text or f"worker {worker} ran out of memory")
        self.worker, self.found_bytes = worker, found_bytes


def is_shortage(error: BaseException) -> bool:
    """Whether an error means that a device is out of memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def is_lost(error: BaseException) -> bool:
    """Whether an error only says that the connection to another worker is lost; that worker reports the cause."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST)


def write_failure(store: Store, rank: int, error: BaseException) -> None:
    """Stores why a worker failed, unless another worker failed earlier."""
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
    """Stores a failure, unless there is one: the first line is its kind, the rest the message for the user."""
    store.compare_set(_KEY, "", text.encode("utf-8", "backslashreplace").decode())


def read_failure(store: Store, exit_codes: Sequence[int | None]) -> Exception:
    """Returns the error to raise, from the first stored failure or else from the workers' exit codes."""
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
    """Appends to an error text the step that --resume continues after, if there is a checkpoint."""
    return f"{text}; --resume goes on after step {steps[-1]}" if steps else text
