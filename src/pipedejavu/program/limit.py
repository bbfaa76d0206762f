"""Limits on the size of a program, checked from the plan alone, before compiling takes any memory."""

from pipedejavu.facts import InputError, Profile
from pipedejavu.plan import Plan

MOST_PASSES = 2_000_000
"""Forwards and backwards of a program. Each adds one or two transfers, and an action takes about 1 kB and 40 µs to
compile, verify and simulate: this many take 5 GB and three minutes."""
MOST_WORKERS = 65_536
"""Workers of a plan, servers included."""
MOST_UNITS = 4_096
"""Units of a profile. The time to find a cut grows with the square of this number."""

MOST_DEVICES = 8_192
"""Devices of a machine that the search accepts: its lists of plans, rings and routes grow with this number."""
MOST_SAMPLES = 1_000_000
"""Samples of an update that is divided into shares: the division assigns them one by one."""


def check_size(plan: Plan, profile: Profile) -> None:
    """Raises InputError if the plan has more stages than the profile has units, or its program would be too large."""
    check_units(profile)
    check_stages(plan, profile.name, len(profile.units))
    check_workers(plan)
    samples = plan.feed.microbatches * plan.feed.samples
    if plan.feed.kind == "share" and samples > MOST_SAMPLES:
        raise InputError(
            f"plan '{plan.name}' shares {samples:,} samples of an update; share at most {MOST_SAMPLES:,} (feed.samples"
            f" times feed.microbatches)"
        )
    check_passes(plan, 1, plan.num_stages or len(profile.units))


def check_stages(plan: Plan, name: str, units: int) -> None:
    """Raises InputError if the plan has more stages than the model of this name has units."""
    if plan.num_stages and plan.num_stages > units:
        raise InputError(
            f"the plan has {plan.num_stages:,} stages but profile '{name}' has {units:,} units; use at most {units:,}"
            " stages (fewer workers or chunks)"
        )


def check_units(profile: Profile) -> None:
    """Raises InputError if the profile has too many units to find a cut."""
    if len(profile.units) > MOST_UNITS:
        raise InputError(
            f"profile '{profile.name}' has {len(profile.units):,} units, and at most {MOST_UNITS:,} can be placed;"
            " profile larger parts of the model as one unit"
        )


def check_devices(count: int, machine: str) -> None:
    """Raises InputError if the machine has more devices than the search accepts."""
    if count > MOST_DEVICES:
        raise InputError(
            f"machine '{machine}' has {count:,} devices to train on, and a plan can be looked for on {MOST_DEVICES:,}"
            " at most; give a machine with fewer hosts, and multiply the replicas of its plan"
        )


def check_workers(plan: Plan) -> None:
    """Raises InputError if the plan has more workers than any machine has devices."""
    if plan.num_workers > MOST_WORKERS:
        raise InputError(
            f"plan '{plan.name}' has {plan.num_workers:,} workers, servers included; use at most {MOST_WORKERS:,}"
        )


def check_passes(plan: Plan, pipelines: int, pieces: int) -> None:
    """Raises InputError if the program would have too many forwards and backwards.

    Each microbatch of each pipeline runs through each piece.
    """
    passes = pipelines * plan.feed.microbatches * plan.steps * pieces * (3 if plan.splits_backward else 2)
    if passes > MOST_PASSES:
        many = f"{plan.feed.microbatches:,} microbatches per update"
        parts = [many, f"{plan.steps:,} updates", f"{pieces:,} pieces", f"{pipelines:,} pipelines"]
        raise InputError(
            f"the program of plan '{plan.name}' would have {passes:,} forwards and backwards ({', '.join(parts)}), and"
            f" at most {MOST_PASSES:,} can be held; use fewer microbatches or steps"
        )
