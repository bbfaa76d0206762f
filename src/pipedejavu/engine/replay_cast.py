"""Where a replay of the audit runs and in which precision: devices, casts, and weights moved by one rounding."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipedejavu.engine.device import CPU, device_of
from pipedejavu.program import Program


def replay_device(program: Program) -> torch.device:
    """Returns a GPU on which a worker trains, if any: its matrix products round as the run's did."""
    devices = [device_of(program, worker) for worker in range(len(program.workers)) if program.held(worker)]
    return next((device for device in devices if device != CPU), CPU)


def nudge_weights(modules: Sequence[nn.Module], source: torch.Generator) -> None:
    """Moves each weight by one unit in its last place, up or down at random; a shared one once."""
    for weight in {id(p): p.data for module in modules for p in module.parameters()}.values():
        if weight.is_floating_point():
            signs = torch.randint(0, 2, weight.shape, generator=source).to(weight) * 2 - 1
            weight.mul_(1 + signs * torch.finfo(weight.dtype).eps)


def widened_tensor(tensor: Tensor) -> Tensor:
    """Returns a floating-point or complex tensor in double precision, and any other as it is."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor
