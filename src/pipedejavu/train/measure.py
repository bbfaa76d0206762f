"""Measures a model for a plan: on each kind of device that the plan uses, at as many sizes as its choices need."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipedejavu.engine import Job, Optimizer
from pipedejavu.engine.optimizer import Tensors
from pipedejavu.facts import Profile
from pipedejavu.plan import Plan
from pipedejavu.profile import Shot, measure_profile
from pipedejavu.profile.measure import MakeUpdate

_TIMES, _LEAST = 4, 2
"""A share of a batch may be small: a microbatch so many times smaller is measured too, of two samples at least, as
batch statistics need more than one."""

Batch = Callable[[int], tuple[Any, Any]]
"""Takes a number of samples; returns inputs and targets."""


def measure(name: str, job: Job, plan: Plan, batch: Batch, kinds: Mapping[str, torch.device]) -> Profile:
    """Measures a job's units; where the plan shares a batch, at two sizes, so that what does not grow is known too."""
    large = plan.feed.samples
    small = max(_LEAST, large // _TIMES)
    sizes = (small, large) if plan.feed.kind == "share" and small < large else (large,)
    shots = [Shot(job.units, *batch(size), job.loss) for size in sizes]
    return measure_profile(name, shots, job.ties, kinds, updates_of(job.optimizer))


def updates_of(optimizer: Optimizer) -> MakeUpdate:
    """Returns how the engine updates parameters with an optimizer."""

    def make(parameters: Sequence[Tensor]) -> Callable[[], None]:
        weights = {str(n): parameter for n, parameter in enumerate(parameters)}
        gradients = {name: torch.full_like(weight, 1e-3) for name, weight in weights.items()}
        state: dict[str, Tensors] = {}

        def update() -> None:
            for name, delta in optimizer.step(0, weights, gradients, state, 1.0):
                delta.add_(weights[name])

        return update

    return make
