"""How large a program may become, told from its plan alone: what is too large is refused before it takes any memory."""

from pipedejavu.facts import InputError, Profile
from pipedejavu.plan import Plan

MOST_PASSES = 2_000_000
"""Forwards and backwards of a program. Each brings one or two transfers along, and an action takes about 1 kB and 40 µs
to compile, verify and simulate: this many take 5 GB and three minutes."""
MOST_WORKERS = 65_536
MOST_UNITS = 4_096
"""Of a profile; deeper ones should be cut more coarsely: a cut compares all pairs of them."""

MOST_DEVICES = 8_192
"""Of a machine that a plan is looked for: lists of plans grow with them, and their rings and routes."""
MOST_SAMPLES = 1_000_000
"""Of a batch that is shared: each is given to whoever ends soonest with it."""


def check_size(plan: Plan, profile: Profile) -> None:
    """Raises InputError for a plan whose program would be too large to hold or to wait for, or has too many stages."""
    check_units(profile)
    units, stages = len(profile.units), plan.num_stages or len(profile.units)
    if stages > units:
        raise InputError(
            f"the plan has {stages:,} stages but profile '{profile.name}' has {units:,} units; use at most {units:,}"
            " stages (fewer workers or chunks)"
        )
    check_workers(plan)
    samples = plan.feed.microbatches * plan.feed.samples
    if plan.feed.kind == "share" and samples > MOST_SAMPLES:
        raise InputError(
            f"plan '{plan.name}' shares {samples:,} samples of an update; share at most {MOST_SAMPLES:,} (feed.samples"
            f" times feed.microbatches)"
        )
    check_passes(plan, 1, stages)


def check_units(profile: Profile) -> None:
    """Raises InputError for a profile of too many units to look for a cut."""
    if len(profile.units) > MOST_UNITS:
        raise InputError(
            f"profile '{profile.name}' has {len(profile.units):,} units, and at most {MOST_UNITS:,} can be placed;"
            " profile larger parts of the model as one unit"
        )


def check_devices(count: int, machine: str) -> None:
    """Raises InputError for more devices than a plan can be looked for."""
    if count > MOST_DEVICES:
        raise InputError(
            f"machine '{machine}' has {count:,} devices to train on, and a plan can be looked for on {MOST_DEVICES:,}"
            " at most; give a machine with fewer hosts, and multiply the replicas of its plan"
        )


def check_workers(plan: Plan) -> None:
    """Raises InputError for more workers than any machine has devices."""
    if plan.num_workers > MOST_WORKERS:
        raise InputError(
            f"plan '{plan.name}' has {plan.num_workers:,} workers, servers included; use at most {MOST_WORKERS:,}"
        )


def check_passes(plan: Plan, pipelines: int, pieces: int) -> None:
    """Raises InputError for too many forwards and backwards: each microbatch of each crew passes each piece."""
    passes = pipelines * plan.feed.microbatches * plan.steps * pieces * (3 if plan.splits_backward else 2)
    if passes > MOST_PASSES:
        many = f"{plan.feed.microbatches:,} microbatches an update"
        parts = [many, f"{plan.steps:,} updates", f"{pieces:,} pieces", f"{pipelines:,} crews"]
        raise InputError(
            f"the program of plan '{plan.name}' would have {passes:,} forwards and backwards ({', '.join(parts)}), and"
            f" at most {MOST_PASSES:,} can be held; use fewer microbatches or steps"
        )
