"""A user's model while it is probed: in evaluation mode, with constant draws, and everything restored afterwards."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipedejavu.source.rng import preserve_rng

_DRAWS = frozenset(
    ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "rand", "randint", "randn", "random")
)
_DRAWS |= {"uniform", *(f"{name}_" for name in _DRAWS | {"uniform"}), *(f"{name}_like" for name in _DRAWS)}
"""Names of functions that draw random numbers, in-place variants included."""


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Puts a model in evaluation mode without randomness; restores the model and all generators on exit."""
    modes = [(part, part.training) for part in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {p.device for p in model.parameters() if p.is_cuda}
    model.eval()
    try:
        with ExitStack() as stack:
            stack.enter_context(preserve_rng(next(iter(devices), torch.device("cpu"))))
            stack.enter_context(
                torch.backends.cudnn.flags(enabled=False)
            )  # cuDNN's RNNs have no backward in evaluation mode
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_ConstantDraws())
            yield
    finally:
        for part, training in modes:
            part.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


@contextmanager
def frozen_but(some: Iterable[nn.Parameter], parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Lets only some of the trained parameters require gradients."""
    kept = {id(parameter) for parameter in some}
    frozen = [parameter for parameter in parameters if id(parameter) not in kept]
    try:
        for parameter in frozen:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


class _ConstantDraws(TorchFunctionMode):
    """Replaces random draws with a constant, so that a sample gets the same values in any batch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function and overwrites what it drew."""
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _DRAWS and isinstance(result, Tensor):
            least = args[0] if len(args) > 1 and isinstance(args[1], int) else (kwargs or {}).get("low", 0)
            with torch.no_grad():
                result.fill_(0.5 if result.is_floating_point() else least)
        return result
