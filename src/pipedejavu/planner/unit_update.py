"""The engine's update of some parameters, ready to be timed."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipedejavu.engine import Optimizer
from pipedejavu.engine.optimizer import LOW, Tensors
from pipedejavu.plan import Precision
from pipedejavu.profile.measured_unit import MakeUpdate
from pipedejavu.profile.unit_time import PLAIN


def updates_of(optimizer: Optimizer, precision: Precision = PLAIN) -> MakeUpdate:
    """Returns a function that builds the engine's update of some parameters, for timing."""
    timed = optimizer.with_moments(precision.moments)

    def make(parameters: Sequence[Tensor]) -> Callable[[], None]:
        weights = {str(n): parameter for n, parameter in enumerate(parameters)}
        gradients = {name: torch.full_like(weight, 1e-3) for name, weight in weights.items()}
        state: dict[str, Tensors] = {}
        out = gradients
        halves = {name: w for name, w in weights.items() if precision.is_split and w.dtype == torch.bfloat16}
        if halves:
            state = {name: {LOW: torch.zeros_like(w, dtype=torch.int16)} for name, w in halves.items()}
            if precision.accumulate == "fp32":
                gradients = gradients | {name: gradients[name].float() for name in halves}

        def update() -> None:
            timed.step(0, weights, gradients, state, 1.0, out=out)

        return update

    return make
