"""Times whole forward passes of a model, without gradients, on data that lie on the device from the start."""

import time
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipedejavu.profile.model_trace import as_call


def time_forward_passes(model: nn.Module, inputs: Any, device: torch.device, passes: int) -> list[float]:
    """Moves the model and its inputs to the device; returns the seconds of each pass, the first one included.

    Dropout and batch statistics are those of training, if the model is in that mode.
    """
    model.to(device)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), as_call(inputs))
    times_s = []
    with torch.no_grad():
        for _ in range(passes):
            _wait(device)
            started = time.perf_counter()
            model(*args, **kwargs)
            _wait(device)
            times_s.append(time.perf_counter() - started)
    return times_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
