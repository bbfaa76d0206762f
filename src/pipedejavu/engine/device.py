"""Where a worker's tensors live: a CUDA device for a GPU that is there, the CPU for all else.

On a machine without GPUs a plan for some runs on CPU tensors, in the same lanes and the same order. What passes
between workers passes through host memory, pinned on the side of a GPU.
"""

import os
from typing import Any

import torch
from torch import Tensor

from pipedejavu.program import Program
from pipedejavu.runtime.host_memory import move_tensor

CPU = torch.device("cpu")


def be_deterministic() -> None:
    """Lets this process compute the same bits each time, wherever torch knows how.

    As `torch.use_deterministic_algorithms` does with warnings, which would load torch's compiler only to tell it so.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    torch.set_deterministic_debug_mode("warn")
    # With NaN, for every new tensor: no bit of a result depends on it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def device_of(program: Program, worker: int) -> torch.device:
    """Returns the torch device of a worker: the n-th GPU of its host in the machine's order is cuda:n."""
    own = program.machine.device(program.devices[worker])
    if own.type != "gpu" or not torch.cuda.is_available():
        return CPU
    gpus = [d.name for d in program.machine.devices if d.type == "gpu" and d.host == own.host]
    return torch.device("cuda", gpus.index(own.name) % torch.cuda.device_count())


def moved(value: Any, device: torch.device) -> Any:
    """Returns a value of any form with its tensors, without their history, on a device.

    From a GPU they come into pinned memory. Copies are issued to the current stream, and there when it has come so far.
    """
    if isinstance(value, tuple | list):
        parts = [moved(v, device) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {name: moved(v, device) for name, v in value.items()}
    if not isinstance(value, Tensor):
        return value
    return move_tensor(value, device)


def hold(value: Any, stream: torch.cuda.Stream) -> None:
    """Keeps the memory of a value's tensors until a stream has done what it was given before they were freed."""
    if isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            hold(part, stream)
    elif isinstance(value, Tensor) and value.is_cuda:
        value.record_stream(stream)
