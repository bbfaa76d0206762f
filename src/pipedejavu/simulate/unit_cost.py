"""Unit costs: a profile and a machine for a plan in which a worker's forward of a microbatch takes 1.

Published schedules are drawn with them: equal stages, free communication. Every size is one byte.
"""

from pipedejavu.facts import Cost, Device, Host, InputError, Link, Machine, Profile, Unit, UnitTime, nearest
from pipedejavu.plan import Plan
from pipedejavu.program.limit import MOST_UNITS, check_workers

PIECES_OF_EAGER = 4
"""Units per stage if a plan reduces and updates piece by piece."""

UNITS_OF_LAYER_MAJOR = 4
"""Units of the model if a plan runs one layer at a time."""

_FREE = 1e30
"""Bytes per second at which transfers do not change any time in double precision."""


def parse_unit_costs(text: str) -> dict[str, float]:
    """Parses 'F=1,B=2' (also I, W, R, and U for the update); raises InputError if the text is malformed."""
    costs: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = part.strip().partition("=")
        if name not in _NAMES or not equals:
            raise InputError(f"'{part}' is not a unit cost; write F=1,B=2{nearest(name, _NAMES)}")
        try:
            costs[name] = float(number)
        except ValueError:
            raise InputError(f"'{number}' is not a number for unit cost {name}") from None
        if not 0 <= costs[name] < float("inf"):
            raise InputError(f"unit cost {name} must be 0 or more, not {number}")
    if {"I", "W"} <= costs.keys() and costs.get("B", costs["I"] + costs["W"]) != costs["I"] + costs["W"]:
        raise InputError(f"B must be I + W, and {costs['B']:g} is not {costs['I']:g} + {costs['W']:g}")
    return costs


_NAMES = ("F", "B", "I", "W", "R", "U")


def unit_costs(plan: Plan, costs: dict[str, float]) -> tuple[Plan, Profile, Machine]:
    """Returns the plan with one-byte buckets, and the profile and machine of these costs.

    A cost is a worker's total time per microbatch; its chunks and pieces divide it evenly. Defaults: F = 1, B = 2,
    W = B / 2, R = F, U = 0.
    """
    forward = costs.get("F", 1.0)
    backward = costs.get("B", costs.get("I", 1.0) + costs.get("W", 1.0))
    weight = costs.get("W", backward - costs["I"] if "I" in costs else backward / 2)
    if not 0 <= weight <= backward:
        raise InputError(f"the halves of a backward cannot exceed it: B={backward:g} and W={weight:g}")
    check_workers(plan)
    is_layered = plan.num_stages is None
    per_stage = PIECES_OF_EAGER if plan.order.is_eager and not is_layered else 1
    chunks = {"loop": plan.place.chunks, "v": 2}.get(plan.place.kind, 1)
    parts = UNITS_OF_LAYER_MAJOR if is_layered else chunks * per_stage

    def cost(total: float) -> Cost:
        if plan.place.shards > 1:  # a group divides the work of samples, and no fixed times
            return Cost(per_sample_s=total / parts / plan.feed.samples)
        return Cost(fixed_s=total / parts)

    time = UnitTime(
        forward=cost(forward),
        backward=cost(backward),
        weight_backward=cost(weight),
        recompute=cost(costs.get("R", forward)),
        update_s=costs.get("U", 0.0) / parts,
    )
    count = UNITS_OF_LAYER_MAJOR if plan.num_stages is None else plan.num_stages * per_stage
    if count > MOST_UNITS:
        raise InputError(f"plan '{plan.name}' has {plan.num_stages:,} stages; use at most {MOST_UNITS // per_stage:,}")
    units = tuple(
        Unit(
            name=f"unit{n}",
            times={"unit": time},
            parameter_bytes=1,
            gradient_bytes=1,
            optimizer_bytes=2,
            activation_bytes=1 / parts,
            boundary_bytes=1.0,
            expert_share=0.5 if plan.divides_experts else 0.0,
            expert_row_bytes=1.0 if plan.divides_experts else 0.0,
        )
        for n in range(count)
    )
    trainers = plan.num_workers - plan.place.servers - plan.place.cpu_replicas
    memory_bytes = 2**50
    devices = [
        Device(name=f"unit{n}", kind="unit", type="gpu", host="host", memory_bytes=memory_bytes)
        for n in range(trainers)
    ]
    devices.append(Device(name="host", kind="unit", type="cpu", host="host", memory_bytes=memory_bytes))
    machine = Machine(
        name="unit costs", hosts=(Host(name="host"),), devices=tuple(devices), links=(Link(bytes_per_s=_FREE),)
    )
    return plan.replace(bucket_bytes=1), Profile(name="unit costs", units=units), machine
