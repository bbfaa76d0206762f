"""A model as a chain of units, and the initial values of its parameters.

The initial values of a parameter depend only on the seed and the parameter's name. So a worker that materialises some
units gets the same values for them as one that holds the whole model.
"""

import math
from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor, nn

from pipedejavu.facts import InputError, nearest
from pipedejavu.zoo.generator import generator

Flow = Tensor | tuple[Tensor, ...]
"""The value that passes from one unit to the next; in training all of its tensors have gradients."""

Std = Callable[[str, torch.Size], float]
"""Returns the standard deviation of a parameter's initial values from its name and shape."""


def he_std(name: str, shape: torch.Size) -> float:  # noqa: ARG001 (a Std takes both)
    """Returns the He standard deviation, which preserves the variance of activations through ReLU layers."""
    return math.sqrt(2 / shape[1:].numel())


class Chain(nn.Module):
    """A model that runs its units one after another; unit names are the prefixes of parameter names.

    The units are passed in on the meta device, without memory. A tied weight is one Parameter that two units hold.
    """

    def __init__(
        self,
        units: Iterable[tuple[str, nn.Module]],
        *,
        std: Std = he_std,
        seed: int = 0,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        for name, unit in units:
            self.add_module(name, unit)
        self.std = std
        self.materialise(torch.get_default_device() if device is None else device, seed)

    def units(self) -> list[tuple[str, nn.Module]]:
        """Returns the units in execution order."""
        return list(self.named_children())

    def forward(self, flow: Flow) -> Flow:
        """Runs all units."""
        for _, unit in self.units():
            flow = unit(flow)
        return flow

    def materialise(self, device: torch.device | str, seed: int, units: Collection[str] | None = None) -> None:
        """Allocates and initialises the parameters and buffers of all units, or of some, on `device`."""
        device = torch.device(device)
        if device.type == "meta":
            return
        known = dict(self.units())
        for name in units or ():
            if name not in known:
                raise InputError(f"the model has no unit '{name}'{nearest(name, known)}")
        before = list(self.named_parameters())  # a tied one by its first name; the list keeps ids unique
        names = {id(parameter): name for name, parameter in before}
        made: dict[int, nn.Parameter] = {}
        for name, unit in known.items():
            if units is not None and name not in units:
                continue
            for module in unit.modules():
                for leaf, parameter in list(module.named_parameters(recurse=False)):
                    key = id(parameter)
                    if key not in made:
                        made[key] = nn.Parameter(self._initial(names[key], parameter, seed).to(device))
                    setattr(module, leaf, made[key])
                for leaf, buffer in list(module.named_buffers(recurse=False)):
                    start = torch.ones if leaf.endswith("var") else torch.zeros  # running statistics of BatchNorm
                    setattr(module, leaf, start(buffer.shape, dtype=buffer.dtype, device=device))

    def _initial(self, name: str, like: Tensor, seed: int) -> Tensor:
        """Returns a parameter's initial values, drawn on the CPU so that all devices start equal."""
        if name.rpartition(".")[2].startswith("bias"):
            return torch.zeros(like.shape, dtype=like.dtype, device="cpu")
        if like.ndim == 1:  # the scale of a norm
            return torch.ones(like.shape, dtype=like.dtype, device="cpu")
        values = torch.empty(like.shape, dtype=like.dtype, device="cpu")
        return values.normal_(0.0, self.std(name, like.shape), generator=generator(seed, name))
