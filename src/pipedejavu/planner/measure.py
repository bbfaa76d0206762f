"""Measures a model for a plan: on each kind of device of the plan, at the microbatch sizes that the plan may use."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pipedejavu.engine import Job
from pipedejavu.facts import Profile
from pipedejavu.plan import Decision, Plan
from pipedejavu.plan.plan_trait import division_of
from pipedejavu.planner.unit_update import updates_of
from pipedejavu.profile import UnitSample, make_samples, measure_profile
from pipedejavu.profile.line_fit import fit_line
from pipedejavu.profile.time_budget import TimeBudget
from pipedejavu.profile.tp_size import with_divided_sums
from pipedejavu.runtime.compiled_unit import UnitCompiler

_REPEATS = 8
_TIMES = 4
"""Shares of a batch may be small, so a microbatch smaller by this factor is measured too, and one of one sample."""

Batch = Callable[[int], tuple[Any, Any]]
"""Takes a number of samples; returns inputs and targets."""
Make = Callable[[range], object]
"""Takes a range of sample numbers; loads those samples."""


def measure(
    name: str,
    job: Job,
    plan: Plan,
    batch: Batch,
    make: Make,
    kinds: Mapping[str, torch.device],
    *,
    at_more: bool = False,
    is_compiled: bool = False,
    budget: TimeBudget | None = None,
) -> Profile:
    """Measures a job's units at the plan's microbatch size.

    Smaller sizes are measured too if `at_more` is set or the plan divides a batch into shares. With `is_compiled` units
    are timed compiled.
    """
    large = plan.feed.samples
    sizes = sorted({1, -(-large // _TIMES), large}) if at_more or plan.feed.kind == "share" else [large]
    unit_samples = make_samples(lambda size: UnitSample(job.units, *batch(size), job.loss), sizes)
    compiler = (job.compiler or silent_compiler()) if is_compiled else None
    updates = updates_of(job.optimizer, plan.precision)
    profile = measure_profile(
        name, unit_samples, job.ties, kinds, updates, compiler=compiler, precision=plan.precision, budget=budget
    )
    if (division := division_of(plan)) and job.graphs is not None:
        profile = with_divided_sums(profile, unit_samples[-1], division)
    return with_batches(profile, make, [unit_sample.samples for unit_sample in unit_samples], kinds)


def explain_estimates(profile: Profile) -> tuple[Decision, ...]:
    """Returns a decision for each kind of device whose times are estimated in part."""
    return tuple(
        Decision(axis="profile", choice=f"estimates for {kind}", reason=reason)
        for kind, reason in profile.estimated.items()
    )


def silent_compiler() -> UnitCompiler:
    """Returns a compiler for measurements; the workers report units that cannot be compiled."""
    return UnitCompiler(say=lambda _: None)


def with_batches(profile: Profile, make: Make, sizes: Sequence[int], kinds: Mapping[str, torch.device]) -> Profile:
    """Adds the time to load a microbatch to the first forward on each CPU; a CPU worker loads its samples itself."""
    load_time = fit_line({size: _batch_times(make, size) for size in sizes})
    first, *others = profile.units
    times = dict(first.times)
    cpus = [kind for kind, device in kinds.items() if device.type == "cpu"]
    for kind in cpus:
        times[kind] = times[kind].replace(forward=times[kind].forward.plus(load_time))
    return profile.replace(
        units=(first.replace(times=times), *others), batch=profile.batch | dict.fromkeys(cpus, load_time)
    )


def _batch_times(make: Make, samples: int) -> list[float]:
    """Times the loading of several microbatches, each with other samples."""
    times = []
    for n in range(1 + _REPEATS):
        start = time.perf_counter()
        make(range(n * samples, (n + 1) * samples))
        times.append(time.perf_counter() - start)
    return times[1:]  # the first also shuffles the data
