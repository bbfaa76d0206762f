"""VGG19 whose units repeat their work on a GPU, for bench/coarse.py --slowed N: a GPU that is N times as slow.

A plan's file: `pipedejavu train bench/slow_gpu.py:vgg19`, with the factor in the environment (SLOW_GPU). On a GPU each
unit runs N − 1 more times forward, and twice as often in its backward, which takes about two forwards; results are
those of the unit alone. On a CPU nothing is repeated. A GPU is slowed this way where its multiprocessors cannot be
divided between processes.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pipedejavu.zoo import build

FACTOR = "SLOW_GPU"
SAMPLES, SIDE, CLASSES = 4096, 32, 10


class _Repeat(torch.autograd.Function):
    """Passes a tensor on, and runs a call in the backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return gradient, None


class Slowed(nn.Module):
    """A unit that runs `times` times as long on a GPU."""

    def __init__(self, unit: nn.Module, times: int):
        super().__init__()
        self.unit, self.times = unit, times

    def forward(self, value: Tensor) -> Tensor:
        output: Tensor = self.unit(value)
        if self.times == 1 or not value.is_cuda:
            return output
        own = {name: tensor.detach() for name, tensor in self.unit.state_dict(keep_vars=True).items()}
        source = value.detach()
        self._repeat(own, source, self.times - 1)
        repeated: Tensor = _Repeat.apply(output, lambda: self._repeat(own, source, 2 * (self.times - 1)))
        return repeated

    def _repeat(self, own: dict[str, Tensor], value: Tensor, times: int) -> None:
        """Runs the unit on the tensors that it had in its forward; changes no statistics and draws nothing."""
        is_training = self.unit.training
        self.unit.eval()
        with torch.no_grad():
            for _ in range(times):
                functional_call(self.unit, own, (value,))
        self.unit.train(is_training)


def vgg19(name: str = "vgg19") -> tuple[nn.Module, Any, Any]:
    """Returns the model, its loss and random images."""
    task = build(name)
    model = nn.Sequential(*(Slowed(unit, int(os.environ.get(FACTOR, "1"))) for _, unit in task.model.units()))
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(SAMPLES, 3, SIDE, SIDE, generator=generator)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    return model, nn.CrossEntropyLoss(), torch.utils.data.TensorDataset(images, labels)


def vgg_small() -> tuple[nn.Module, Any, Any]:
    """Returns a small VGG in its place, for a quick run."""
    return vgg19("vgg-small")
