"""Measures a model for a plan: on each kind of device that the plan uses, at as many sizes as its choices need."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipedejavu.engine import Job
from pipedejavu.facts import Profile
from pipedejavu.plan import Plan
from pipedejavu.profile import Shot, measure_profile

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
    return measure_profile(name, [Shot(job.units, *batch(size), job.loss) for size in sizes], job.ties, kinds)
