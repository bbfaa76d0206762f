"""Measures a model for a plan: on each kind of device that the plan uses, at as many sizes as its choices need."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipedejavu.engine import Job, Optimizer
from pipedejavu.engine.optimizer import Tensors
from pipedejavu.facts import Profile
from pipedejavu.plan import Plan
from pipedejavu.profile import UnitSample, make_samples, measure_profile
from pipedejavu.profile.line_fit import fit_line
from pipedejavu.profile.unit_time import MakeUpdate

_REPEATS = 8
_TIMES = 4
"""A share of a batch may be small: a microbatch so many times smaller is measured too, and one of one sample."""

Batch = Callable[[int], tuple[Any, Any]]
"""Takes a number of samples; returns inputs and targets."""
Make = Callable[[range], object]
"""Makes the samples of a run with these numbers."""


def measure(
    name: str,
    job: Job,
    plan: Plan,
    batch: Batch,
    make: Make,
    kinds: Mapping[str, torch.device],
    *,
    at_more: bool = False,
) -> Profile:
    """Measures a job's units at the plan's microbatch; where asked or the plan shares a batch, at smaller ones too."""
    large = plan.feed.samples
    sizes = sorted({1, -(-large // _TIMES), large}) if at_more or plan.feed.kind == "share" else [large]
    unit_samples = make_samples(lambda size: UnitSample(job.units, *batch(size), job.loss), sizes)
    profile = measure_profile(name, unit_samples, job.ties, kinds, updates_of(job.optimizer))
    return with_batches(profile, make, [unit_sample.samples for unit_sample in unit_samples], kinds)


def with_batches(profile: Profile, make: Make, sizes: Sequence[int], kinds: Mapping[str, torch.device]) -> Profile:
    """Adds what getting a microbatch takes to the first forward on each CPU, whose worker gets its samples itself."""
    taken = fit_line({size: _batch_times(make, size) for size in sizes})
    first, *others = profile.units
    times = dict(first.times)
    own = [kind for kind, device in kinds.items() if device.type == "cpu"]
    for kind in own:
        times[kind] = times[kind].replace(forward=times[kind].forward.plus(taken))
    return profile.replace(units=(first.replace(times=times), *others), batch=dict.fromkeys(own, taken))


def _batch_times(make: Make, samples: int) -> list[float]:
    """Times how long a microbatch takes to come, each with samples of its own, from all over the data."""
    times = []
    for n in range(1 + _REPEATS):
        start = time.perf_counter()
        make(range(n * samples, (n + 1) * samples))
        times.append(time.perf_counter() - start)
    return times[1:]  # the first puts the data into an order


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
