"""Measures a model for a plan: on each kind of device that the plan uses, at as many sizes as its choices need."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipedejavu.engine import Job
from pipedejavu.facts import Cost, Profile, UnitTime
from pipedejavu.plan import Plan
from pipedejavu.profile import Shot, measure_profile
from pipedejavu.profile.step import PARTS

_TIMES, _LEAST = 4, 2
"""A share of a batch may be small: a microbatch so many times smaller is measured too, of two samples at least, as
batch statistics need more than one."""

Batch = Callable[[int], tuple[Any, Any]]
"""Takes a number of samples; returns inputs and targets."""


def measure(name: str, job: Job, plan: Plan, batch: Batch, kinds: Mapping[str, torch.device]) -> Profile:
    """Measures a job's units; where the plan shares a batch, at two sizes, so that what does not grow is known too."""

    def at(samples: int) -> Profile:
        return measure_profile(name, [Shot(job.units, *batch(samples), job.loss)], job.ties, kinds)

    large = plan.feed.samples
    small = max(_LEAST, large // _TIMES)
    if plan.feed.kind != "share" or small >= large:
        return at(large)
    return fit(at(small), small, at(large), large)


def fit(low: Profile, small: int, high: Profile, large: int) -> Profile:
    """Returns a profile whose times pass through those measured at two sizes; none shrinks, none begins below zero."""

    def line(before: Cost, after: Cost) -> Cost:
        first, second = before.at(small), after.at(large)
        slope = max(0.0, second - first) / (large - small)
        if slope * large > second:
            return Cost(per_sample_s=second / large)
        return Cost(fixed_s=second - slope * large, per_sample_s=slope)

    def time(before: UnitTime, after: UnitTime) -> UnitTime:
        parts = [part for part in PARTS if getattr(after, part) is not None]
        return after.but(**{part: line(getattr(before, part), getattr(after, part)) for part in parts})

    units = [
        after.but(times={kind: time(before.times[kind], own) for kind, own in after.times.items()})
        for before, after in zip(low.units, high.units, strict=True)
    ]
    return high.but(units=tuple(units))
