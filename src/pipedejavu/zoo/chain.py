"""A model as a chain of units, and the initial values of its parameters.

The initial values of a parameter depend only on the seed and the parameter's name. So a worker that materialises some
units gets the same values for them as one that holds the whole model.
"""

import math
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from pipedejavu.facts import InputError, nearest
from pipedejavu.zoo.generator import generator

MIN_THREADED = 1 << 22
"""Values from which on parameters are drawn by all threads."""

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
        wanted = [unit for name, unit in known.items() if units is None or name in units]
        made = self._drawn({id(p) for unit in wanted for p in unit.parameters()}, device, seed)
        for unit in wanted:
            for module in unit.modules():
                for leaf, parameter in list(module.named_parameters(recurse=False)):
                    if id(parameter) in made:  # a tied one may be in place already
                        setattr(module, leaf, made[id(parameter)])
                for leaf, buffer in list(module.named_buffers(recurse=False)):
                    start = torch.ones if leaf.endswith("var") else torch.zeros  # running statistics of BatchNorm
                    setattr(module, leaf, start(buffer.shape, dtype=buffer.dtype, device=device))

    def _drawn(self, wanted: Collection[int], device: torch.device, seed: int) -> dict[int, nn.Parameter]:
        """Returns new parameters by the ids of those that they replace, drawn by all threads: each has its generator.

        A tied parameter is drawn once, by its first name.
        """
        before = [(name, parameter) for name, parameter in self.named_parameters() if id(parameter) in wanted]

        def draw(item: tuple[str, nn.Parameter]) -> nn.Parameter:
            name, parameter = item
            return nn.Parameter(self._initial(name, parameter, seed).to(device))

        is_large = sum(parameter.numel() for _, parameter in before) >= MIN_THREADED
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            drawn = (pool.map if is_large else map)(draw, before)
            return {id(parameter): new for (_, parameter), new in zip(before, drawn, strict=True)}

    def _initial(self, name: str, like: Tensor, seed: int) -> Tensor:
        """Returns a parameter's initial values, drawn on the CPU so that all devices start equal."""
        if name.rpartition(".")[2].startswith("bias"):
            return torch.zeros(like.shape, dtype=like.dtype, device="cpu")
        if like.ndim == 1:  # the scale of a norm
            return torch.ones(like.shape, dtype=like.dtype, device="cpu")
        values = torch.empty(like.shape, dtype=like.dtype, device="cpu")
        return values.normal_(0.0, self.std(name, like.shape), generator=generator(seed, name))
