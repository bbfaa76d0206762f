"""The interval between checkpoints: as requested, or the one that minimises time lost to saving and to failures."""

import math

from pipedejavu.facts import InputError, format_seconds
from pipedejavu.plan import Plan
from pipedejavu.program import Program
from pipedejavu.run.options import TrainOptions
from pipedejavu.simulate import simulate

ASSUMED_FAILURE_S = 86400.0
"""Mean time between failures: one day."""
ASSUMED_COPY_BYTES_PER_S = 1e9
"""Rate of the copy that training waits for; writing to disk overlaps with training."""


def steps_of(plan: Plan, options: TrainOptions, start: int) -> int:
    """Returns the updates per program: one for synchronous plans, else all up to the next checkpoint.

    Saving a plan without a flush drains its pipeline, which changes what it computes, so such a plan is saved only when
    requested. Raises InputError if the number of steps is not a multiple of the requested interval.
    """
    every, left = options.checkpoint_every, max(1, options.steps - start)
    if plan.version.kind == "sync":
        return 1
    if not every or every >= left:
        return left
    if plan.version.flushed_updates > start:
        raise InputError(
            f"plan '{plan.name}' flushes its first {plan.version.flushed_updates} updates, which its program holds"
            f" together with all others; leave --checkpoint-every {every} out (it is saved after step {options.steps}),"
            f" or train --steps {max(every, plan.version.flushed_updates)} first and go on with --resume"
        )
    if left % every:
        near = max(n for n in range(1, every + 1) if left % n == 0)
        raise InputError(
            f"plan '{plan.name}' is drained at each checkpoint, and {left} steps cannot be divided by"
            f" --checkpoint-every {every}; use {near}, or change --steps"
        )
    return every


def choose_interval(options: TrainOptions, program: Program) -> tuple[int, str]:
    """Returns the updates between two checkpoints (0 for none) and a message for the user, if any."""
    plan, asked = program.plan, options.checkpoint_every
    is_drained = plan.version.kind != "sync"
    if asked == 0:
        return 0, ""
    if asked is not None:
        drains = f"checkpoints every {asked} steps: each one drains the pipeline" if is_drained else ""
        return min(asked, options.steps), drains
    if is_drained:
        return (
            options.steps,
            "one checkpoint at the end: others would drain the pipeline; --checkpoint-every asks for them",
        )
    size = sum(unit.parameter_bytes + unit.optimizer_bytes for unit in program.profile.units)
    cost_s, step_s = size / ASSUMED_COPY_BYTES_PER_S, simulate(program).makespan_s / plan.steps
    period_s = math.sqrt(2 * cost_s * ASSUMED_FAILURE_S)
    every = max(1, min(options.steps, round(period_s / step_s)))
    if every == options.steps:
        return every, ""
    return every, (
        f"checkpoints every {every} steps, about {format_seconds(every * step_s)} (Young and Daly, for a failure a day"
        f" and {format_seconds(cost_s)} to save)"
    )
