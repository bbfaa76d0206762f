"""The torch device of a worker: its CUDA device if the machine has one, else the CPU.

On a machine without GPUs a plan for GPUs runs on CPU tensors, in the same lanes and order. Tensors pass between workers
through host memory, which is pinned if the worker is on a GPU.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipedejavu.program import Program
from pipedejavu.runtime.host_memory import move_tensor

CPU = torch.device("cpu")


def be_deterministic() -> None:
    """Makes this process deterministic wherever torch has a deterministic algorithm, and warns elsewhere.

    Does the same as `torch.use_deterministic_algorithms(True, warn_only=True)` without loading torch's compiler.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    torch.set_deterministic_debug_mode("warn")
    # Filling new tensors with NaN takes time and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def deterministic(*, is_on: bool) -> Iterator[None]:
    """Makes this process deterministic inside the `with` block if asked to; what is compiled there is for this mode."""
    mode = torch.get_deterministic_debug_mode()
    if is_on:
        be_deterministic()
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


def device_of(program: Program, worker: int) -> torch.device:
    """Returns the torch device of a worker: the n-th GPU of its host in the machine's order is cuda:n."""
    device = program.machine.device(program.devices[worker])
    if device.type != "gpu" or not torch.cuda.is_available():
        return CPU
    gpus = [d.name for d in program.machine.devices if d.type == "gpu" and d.host == device.host]
    return torch.device("cuda", gpus.index(device.name) % torch.cuda.device_count())


def moved(value: Any, device: torch.device) -> Any:
    """Returns a nested value with its tensors detached and on a device.

    Copies from a GPU go to pinned memory. Copies are asynchronous on the current stream.
    """
    if isinstance(value, tuple | list):
        parts = [moved(v, device) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {name: moved(v, device) for name, v in value.items()}
    if not isinstance(value, Tensor):
        return value
    return move_tensor(value, device)


def record_stream(value: Any, stream: torch.cuda.Stream) -> None:
    """Delays reuse of the memory of a value's tensors until a stream has run what was issued before they were freed."""
    if isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            record_stream(part, stream)
    elif isinstance(value, Tensor) and value.is_cuda:
        value.record_stream(stream)
