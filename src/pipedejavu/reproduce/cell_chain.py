"""A chain of cells like AmoebaNet's: branches of separable convolutions that are summed, with reductions in between.

Only the shape of the load is AmoebaNet's: early cells hold large images and few parameters, late cells the reverse.
"""

from torch import Tensor, nn
from torch.nn import functional

from pipedejavu.zoo.chain import Chain
from pipedejavu.zoo.vgg import ClassHead

KERNELS = (3, 5, 7)


class Separable(nn.Module):
    """A depthwise convolution, a pointwise one, and ReLU."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int, stride: int):
        super().__init__()
        self.depthwise = nn.Conv2d(
            channels_in, channels_in, kernel, stride, padding=kernel // 2, groups=channels_in, bias=False
        )
        self.pointwise = nn.Conv2d(channels_in, channels_out, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Keeps the image's size, or halves it."""
        return functional.relu(self.pointwise(self.depthwise(image)))


class BranchCell(nn.Module):
    """Branches of separable convolutions with several kernels, and their sum."""

    def __init__(self, channels_in: int, channels_out: int, stride: int):
        super().__init__()
        self.branches = nn.ModuleList(Separable(channels_in, channels_out, kernel, stride) for kernel in KERNELS)

    def forward(self, image: Tensor) -> Tensor:
        """Sums the branches, and adds the image if the shape stays."""
        total: Tensor = sum((branch(image) for branch in self.branches[1:]), self.branches[0](image))
        return total + image if total.shape == image.shape else total


class CellChain(Chain):
    """A stem, stages of normal cells that each begin with a reduction, and a head."""

    def __init__(self, channels: int, cells: int, *, seed: int = 0, device: str | None = None):
        units: list[tuple[str, nn.Module]] = [("stem", nn.Conv2d(3, channels, 3, padding=1))]
        for stage in range(3):
            width = channels * 2**stage
            for n in range(cells):
                is_reduction = stage > 0 and n == 0
                before = width // 2 if is_reduction else width
                units.append((f"cell{len(units)}", BranchCell(before, width, stride=2 if is_reduction else 1)))
        units.append(("head", ClassHead(channels * 4, 10)))
        super().__init__([(name, unit.to("meta")) for name, unit in units], seed=seed, device=device)
