"""Residual networks, ResNet-18 and ResNet-50; for small images the stem keeps the size."""

from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from pipedejavu.facts import Record
from pipedejavu.zoo.chain import Chain
from pipedejavu.zoo.form import Count, ImageForm
from pipedejavu.zoo.vgg import ClassHead

_LARGE_SIDE = 64
"""From this side on, the stem divides the image's side by four."""

_EXPANSION = {"basic": 1, "bottleneck": 4}
"""Output channels of a block over its inner channels."""


class ResnetSize(Record):
    """Size of a ResNet."""

    kind: Literal["basic", "bottleneck"] = "basic"
    blocks: tuple[Count, ...] = Field(default=(2, 2, 2, 2), min_length=1)
    """Blocks per stage; each stage halves the image and doubles the channels of the previous one."""
    width: int = Field(default=64, ge=1)
    """Channels of the first stage."""
    classes: int = Field(default=10, ge=2)
    side: int = Field(default=32, ge=1)

    def form(self) -> ImageForm:
        """Returns the form of its samples."""
        return ImageForm(shape=(3, self.side, self.side), classes=self.classes)


SIZES = {
    "resnet18": ResnetSize(),
    "resnet50": ResnetSize(kind="bottleneck", blocks=(3, 4, 6, 3)),
}


class Stem(nn.Module):
    """The first convolution."""

    def __init__(self, width: int, is_large: bool):
        super().__init__()
        self.convolution = _convolution(3, width, 7, 2) if is_large else _convolution(3, width, 3, 1)
        self.norm = nn.BatchNorm2d(width)
        self.is_large = is_large

    def forward(self, image: Tensor) -> Tensor:
        """Keeps the size of a small image, and divides a large image's side by four."""
        image = functional.relu(self.norm(self.convolution(image)))
        return functional.max_pool2d(image, 3, stride=2, padding=1) if self.is_large else image


class ResidualBlock(nn.Module):
    """Convolutions with BatchNorm, and a shortcut around them.

    Basic: 3×3, 3×3. Bottleneck: 1×1, 3×3, 1×1. The first 3×3 has the stride.
    """

    def __init__(self, channels: int, width: int, stride: int, kind: str):
        super().__init__()
        out = width * _EXPANSION[kind]
        kernels = [(3, stride), (3, 1)] if kind == "basic" else [(1, 1), (3, stride), (1, 1)]
        widths = [channels, *[width] * (len(kernels) - 1), out]
        self.convolutions = nn.ModuleList(
            _convolution(widths[n], widths[n + 1], kernel, step) for n, (kernel, step) in enumerate(kernels)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(w) for w in widths[1:])
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(_convolution(channels, out, 1, stride), nn.BatchNorm2d(out))

    def forward(self, image: Tensor) -> Tensor:
        """Divides the image's side by the stride."""
        hidden = image
        for n, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            hidden = norm(convolution(functional.relu(hidden) if n else hidden))
        return functional.relu(hidden + self.shortcut(image))


class Resnet(Chain):
    """A ResNet; the stem, each residual block and the head are units."""

    def __init__(self, size: ResnetSize, *, seed: int = 0, device: torch.device | str | None = None):
        with torch.device("meta"):
            blocks = list(_blocks(size))
            channels = size.width * 2 ** (len(size.blocks) - 1) * _EXPANSION[size.kind]
            units = [
                ("stem", Stem(size.width, is_large=size.side >= _LARGE_SIDE)),
                *((f"block{n}", block) for n, block in enumerate(blocks)),
                ("head", ClassHead(channels, size.classes)),
            ]
        super().__init__(units, seed=seed, device=device)


def _blocks(size: ResnetSize) -> Iterator[ResidualBlock]:
    channels, width = size.width, size.width
    for stage, num_blocks in enumerate(size.blocks):
        for n in range(num_blocks):
            yield ResidualBlock(channels, width, stride=2 if stage and not n else 1, kind=size.kind)
            channels = width * _EXPANSION[size.kind]
        width *= 2


def _convolution(channels_in: int, channels_out: int, kernel: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)
