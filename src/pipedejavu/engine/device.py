"""Where a worker's tensors live: a CUDA device for a GPU that is there, the CPU for all else.

On a machine without GPUs a plan for some runs on CPU tensors, in the same lanes and the same order. What passes
between workers passes through host memory, pinned on the side of a GPU.
"""

import torch
from torch import Tensor

from pipedejavu.program import Program

CPU = torch.device("cpu")


def device_of(program: Program, worker: int) -> torch.device:
    """Returns the torch device of a worker: the n-th GPU of its host in the machine's order is cuda:n."""
    own = program.machine.device(program.devices[worker])
    if own.type != "gpu" or not torch.cuda.is_available():
        return CPU
    gpus = [d.name for d in program.machine.devices if d.type == "gpu" and d.host == own.host]
    return torch.device("cuda", gpus.index(own.name) % torch.cuda.device_count())


def to_host(tensor: Tensor) -> Tensor:
    """Returns a tensor in host memory; from a GPU through a pinned buffer, complete when this returns."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu":
        return tensor
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    staged.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return staged


def to_device(value: object, device: torch.device) -> object:
    """Returns a value, or a tuple of values, with its tensors on a device."""
    if isinstance(value, tuple):
        return tuple(to_device(v, device) for v in value)
    return value.to(device) if isinstance(value, Tensor) else value
