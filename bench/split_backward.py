"""Cost of a backward in two halves, in one run: both halves ÷ the whole, and two requests to autograd ÷ the whole.

    python bench/split_backward.py [--steps 15]

For each model, a microbatch goes forward three times per step: its backward then runs whole, in halves that share no
work, and as two walks of the graph (the gradients of the inputs, then those of the weights). The ways take turns, on
one thread. Medians of all steps after two.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from pipedejavu.runtime.split_backward import backward_inputs
from pipedejavu.zoo.transformer import TransformerBlock, TransformerSize

WARM_UP = 2


class LlamaLayer(nn.Module):
    """A decoder layer with RMSNorm, rotary positions and a gated MLP."""

    def __init__(self, width: int = 512, heads: int = 8):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Runs attention and the MLP."""
        y = self.norms[0](x)
        query, key, value = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = scaled_dot_product_attention(_rotated(query), _rotated(key), value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


def _rotated(x: Tensor) -> Tensor:
    """Returns queries or keys, turned by their positions."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[-2]), 10_000 ** -(torch.arange(half) / half))
    left, right = x.chunk(2, -1)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), -1)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))


def _convnet() -> nn.Module:
    layers = [nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(64, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())


def _twice() -> nn.Module:
    layer = nn.Linear(768, 768)
    return nn.Sequential(layer, nn.GELU(), layer)


def _block() -> nn.Module:
    return TransformerBlock(TransformerSize(layers=1, width=256, context=128, vocabulary=64, heads=4), is_causal=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP, width 512": (_mlp, (128, 512)),
    "convolutions with BatchNorm": (_convnet, (4, 32, 32, 32)),
    "GPT block, width 256": (_block, (2, 128, 256)),
    "Llama layer, width 512": (LlamaLayer, (1, 128, 512)),
    "a layer used twice": (_twice, (128, 768)),
}


class Contest:
    """One model, and the times of its backward each way."""

    def __init__(self, model: nn.Module, shape: tuple[int, ...]):
        self.model, self.weights = model, list(model.parameters())
        self.leaf = torch.randn(shape).requires_grad_()
        self.times: dict[str, list[float]] = {"whole": [], "halves": [], "first half": [], "two walks": []}

    def step(self) -> None:
        """Runs the backward each way."""
        self._time("whole", lambda y: torch.autograd.backward(y, torch.ones_like(y)))
        self._time("halves", self._halves)
        self._time("two walks", self._walks)

    def _time(self, name: str, run: Callable[[Tensor], None]) -> None:
        output = self.model(self.leaf)
        start = time.perf_counter()
        run(output)
        self.times[name].append(time.perf_counter() - start)
        self.model.zero_grad()
        self.leaf.grad = None

    def _halves(self, output: Tensor) -> None:
        start = time.perf_counter()
        _, pending = backward_inputs([output], [torch.ones_like(output)], [self.leaf], self.weights)
        self.times["first half"].append(time.perf_counter() - start)
        pending.accumulate()

    def _walks(self, output: Tensor) -> None:
        head = torch.ones_like(output)
        torch.autograd.grad(output, self.leaf, head, retain_graph=True)
        torch.autograd.grad(output, self.weights, head)

    def row(self) -> str:
        """Returns the medians as a row of a table."""
        taken = {name: median(times[WARM_UP:]) for name, times in self.times.items()}
        first, whole = taken["first half"], taken["whole"]
        ratios = f"{taken['halves'] / whole:.2f} | {taken['two walks'] / whole:.2f}"
        return f"{1e3 * whole:.2f} | {1e3 * first:.2f} + {1e3 * (taken['halves'] - first):.2f} | {ratios}"


def main() -> None:
    """Prints a row per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| model | B, ms | I + W, ms | (I + W) / B | two walks / B |\n|---|---|---|---|---|")
    contests = {name: Contest(make(), shape) for name, (make, shape) in MODELS.items()}
    for _ in range(WARM_UP + steps):
        for contest in contests.values():
            contest.step()
    for name, contest in contests.items():
        print(f"| {name} | {contest.row()} |")


if __name__ == "__main__":
    main()
