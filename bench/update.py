"""Speed of the engine's AdamW on the host, side by side in one run: torch's operations, the native pass, torch's fused.

    python bench/update.py [--millions 20] [--steps 15] [--threads 2]

All update the same float32 parameters from the same gradients, step by step in turn, so that they see the same machine.
*Plain* is the update as a sequence of torch operations, which the engine had before; *engine* is `AdamW.step`, which
writes the next version to the memory of the gradients, or the weights in place; *fused* is `torch.optim.AdamW` with
`fused=True`. Prints medians, and each one's time as a multiple of the engine's next version.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from pipedejavu.engine import AdamW
from pipedejavu.optim.native import library

WIDTH, SETTINGS, WARM_UP = 1024, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}, 2

Tensors = dict[str, Tensor]


def parameters(count: int) -> Tensors:
    """Returns matrices and biases with about this many elements together."""
    source, tensors = torch.Generator().manual_seed(0), {}
    for n in range(max(1, count // (WIDTH * WIDTH + WIDTH))):
        tensors[f"{n}.weight"] = torch.randn(WIDTH, WIDTH, generator=source)
        tensors[f"{n}.bias"] = torch.randn(WIDTH, generator=source)
    return tensors


def plain_step(weights: Tensors, gradients: Tensors, state: dict[str, Tensors], step: int) -> Tensors:
    """AdamW by torch's operations; the new weights take the memory of the gradients."""
    lr, (beta1, beta2), eps, decay = SETTINGS.values()
    for name, gradient in gradients.items():
        slots = state.setdefault(name, {})
        if not slots:
            slots |= {"m": torch.zeros_like(gradient), "v": torch.zeros_like(gradient)}
        gradient.mul_(1.0)
        mean = slots["m"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        square = slots["v"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        scale = (square.sqrt() / math.sqrt(1 - beta2**step)).add_(eps)
        torch.div(mean, scale, out=gradient).mul_(-lr / (1 - beta1**step))
        gradient.sub_(weights[name], alpha=lr * decay).add_(weights[name])
    return gradients


class Contender:
    """A way to update, with weights and state of its own."""

    def __init__(self, initial: Tensors):
        self.weights = {name: tensor.clone() for name, tensor in initial.items()}
        self.state: dict[str, Tensors] = {}
        self.times: list[float] = []

    def run(self, step: int, gradients: Tensors) -> None:
        """Times one update; the gradients are a copy that it may change."""
        started = time.perf_counter()
        self.update(step, gradients)
        self.times.append(time.perf_counter() - started)

    def update(self, step: int, gradients: Tensors) -> None:
        raise NotImplementedError


class Plain(Contender):
    def update(self, step: int, gradients: Tensors) -> None:
        self.weights = plain_step(self.weights, gradients, self.state, step)


class Engine(Contender):
    def update(self, step: int, gradients: Tensors) -> None:
        AdamW(**SETTINGS).step(step - 1, self.weights, gradients, self.state, 1.0, out=gradients)
        self.weights = gradients


class EngineInPlace(Contender):
    def update(self, step: int, gradients: Tensors) -> None:
        AdamW(**SETTINGS).step(step - 1, self.weights, gradients, self.state, 1.0, out=self.weights)


class Fused(Contender):
    def __init__(self, initial: Tensors):
        super().__init__(initial)
        self.optimizer = torch.optim.AdamW([w.requires_grad_() for w in self.weights.values()], fused=True, **SETTINGS)

    def update(self, step: int, gradients: Tensors) -> None:  # noqa: ARG002
        for name, weight in self.weights.items():
            weight.grad = gradients[name]
        self.optimizer.step()


CONTENDERS: dict[str, Callable[[Tensors], Contender]] = {
    "plain": Plain,
    "engine, next version": Engine,
    "engine, in place": EngineInPlace,
    "fused": Fused,
}


def measure(count: int, steps: int) -> dict[str, list[float]]:
    """Returns the times of each contender's steps, which take turns in changing order."""
    initial = parameters(count)
    contenders = {name: make(initial) for name, make in CONTENDERS.items()}
    source = torch.Generator().manual_seed(1)
    for step in range(1, steps + WARM_UP + 1):
        gradients = {name: torch.randn(tensor.shape, generator=source) for name, tensor in initial.items()}
        order = list(contenders.values())
        for contender in order[step % len(order) :] + order[: step % len(order)]:
            contender.run(step, {name: gradient.clone() for name, gradient in gradients.items()})
    _check(contenders)
    return {name: contender.times[WARM_UP:] for name, contender in contenders.items()}


def _check(contenders: dict[str, Contender]) -> None:
    """Raises RuntimeError if the contenders have not trained the same weights."""
    engine = contenders["engine, next version"].weights
    for name, contender in contenders.items():
        furthest = max(float((contender.weights[n].detach() - w).abs().max()) for n, w in engine.items())
        if furthest > 1e-4:
            raise RuntimeError(f"{name} ends {furthest:g} from the engine, far beyond rounding; look at its arithmetic")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=20.0, help="parameters, in millions")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    times = measure(round(asked.millions * 1e6), asked.steps)
    base = median(times["engine, next version"])
    figures = {
        name: {"median_ms": 1e3 * median(found), "fastest_ms": 1e3 * min(found), "of_engine": median(found) / base}
        for name, found in times.items()
    }
    print(json.dumps({"threads": asked.threads, "is_native": library() is not None, **figures}, indent=2))


if __name__ == "__main__":
    main()
