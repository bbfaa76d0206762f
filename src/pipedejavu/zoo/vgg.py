"""VGG networks for small images: VGG19, and a small one that trains in seconds on a CPU."""

from typing import Annotated, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from pipedejavu.facts import Record
from pipedejavu.zoo.chain import Chain
from pipedejavu.zoo.form import Count, ImageForm

Stage = Annotated[tuple[Count, ...], Field(min_length=1)]


class VggSize(Record):
    """Size of a VGG."""

    stages: tuple[Stage, ...] = Field(min_length=1)
    """Channels of each convolution; a stage ends with a pooling that halves the image."""
    classes: int = Field(default=10, ge=2)
    channels: int = Field(default=3, ge=1)
    """Channels of the image."""
    side: int = Field(default=32, ge=1)
    """Side of the image in pixels; at least 2 to the power of the number of stages."""
    has_batch_norm: bool = True

    def form(self) -> ImageForm:
        """Returns the form of its samples."""
        return ImageForm(shape=(self.channels, self.side, self.side), classes=self.classes)

    def disagreements(self) -> list[str]:
        """Returns a fault if the image is too small for its stages."""
        least = 2 ** len(self.stages)
        if self.side < least:
            return [f"{len(self.stages)} stages halve a side of at least {least} pixels, found {self.side}; raise side"]
        return []

    @model_validator(mode="after")
    def _agree(self) -> Self:
        return self.agreed()


SIZES = {
    "vgg19": VggSize(stages=((64,) * 2, (128,) * 2, (256,) * 4, (512,) * 4, (512,) * 4)),
    "vgg-small": VggSize(stages=((16,), (32,), (64, 64))),
}


class Convolution(nn.Module):
    """A 3×3 convolution, BatchNorm if enabled, ReLU, and a pooling at the end of a stage.

    BatchNorm uses the statistics of the microbatch (rule G4).
    """

    def __init__(self, channels_in: int, channels_out: int, has_batch_norm: bool, has_pooling: bool):
        super().__init__()
        self.convolution = nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1)
        self.norm = nn.BatchNorm2d(channels_out) if has_batch_norm else nn.Identity()
        self.has_pooling = has_pooling

    def forward(self, image: Tensor) -> Tensor:
        """Keeps the image's size, or halves it."""
        image = functional.relu(self.norm(self.convolution(image)))
        return functional.max_pool2d(image, 2) if self.has_pooling else image


class ClassHead(nn.Module):
    """The mean over the image, and a linear layer to the classes."""

    def __init__(self, channels: int, classes: int):
        super().__init__()
        self.linear = nn.Linear(channels, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Returns logits."""
        logits: Tensor = self.linear(image.mean(dim=(2, 3)))
        return logits


class Vgg(Chain):
    """A VGG; each convolution is a unit."""

    def __init__(self, size: VggSize, *, seed: int = 0, device: torch.device | str | None = None):
        units: list[tuple[str, nn.Module]] = []
        channels = size.channels
        with torch.device("meta"):
            for widths in size.stages:
                for n, width in enumerate(widths):
                    unit = Convolution(channels, width, size.has_batch_norm, has_pooling=n == len(widths) - 1)
                    units.append((f"convolution{len(units)}", unit))
                    channels = width
            units.append(("head", ClassHead(channels, size.classes)))
        super().__init__(units, seed=seed, device=device)
