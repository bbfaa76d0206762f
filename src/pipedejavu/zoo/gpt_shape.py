"""Profiles of GPT models from their shape alone: closed formulas, without a model, weights or torch.

Times are FLOP and bytes over a device's rates, times its efficiency, which is assumed if the machine does not state it.
"""

from typing import NamedTuple

from pipedejavu.facts import Cost, Device, InputError, Machine, Profile, Unit, UnitTime, nearest

EFFICIENCY = 0.4
"""Share of a device's peak rate that matrix products in training are assumed to reach."""

_WEIGHT_BYTES, _GRADIENT_BYTES, _OPTIMIZER_BYTES = 2, 2, 12
"""Bytes per parameter: bf16 weight and gradient; fp32 master weight and two moments."""

_UPDATE_TRAFFIC_BYTES = 28
"""Bytes that one AdamW step reads and writes per parameter."""

_NO_RATE = 1e9
"""Rate of a device that states none."""


class Shape(NamedTuple):
    """Size of a GPT."""

    layers: int
    width: int
    context: int
    vocabulary: int = 256


SHAPES = {
    "gpt-tiny": Shape(4, 128, 256),
    "gpt-small": Shape(12, 768, 1024),
    "gpt-medium": Shape(24, 1024, 1024),
    "gpt-large": Shape(36, 1280, 1024),
    "gpt-1.3b": Shape(24, 2048, 2048),
    "gpt-6.7b": Shape(32, 4096, 2048),
    "gpt-175b": Shape(96, 12288, 2048, 50257),
}


def tokens_of(name: str) -> int | None:
    """Returns the tokens per sample of a shape; None for another model."""
    return SHAPES[name].context if name in SHAPES else None


def estimate_profile(name: str, machine: Machine) -> Profile:
    """Returns the profile of a shape on a machine's kinds of devices."""
    if name not in SHAPES:
        raise InputError(f"there is no model shape '{name}'{nearest(name, SHAPES)}")
    layers, width, context, vocabulary = SHAPES[name]
    kinds = {device.kind: device for device in machine.devices}
    # Multiply-adds of a block per token: 12 width² in its matrices, 2 context · width in its attention.
    block_flop = 2.0 * context * (12 * width * width + 2 * context * width)
    units = [_unit("embedding", kinds, shape=SHAPES[name], parameters=(vocabulary + context) * width, flop=0.0)]
    for n in range(layers):
        unit = _unit(f"block{n}", kinds, SHAPES[name], 12 * width * width, block_flop, saved_per_value=34)
        units.append(unit)
    head_flop = 2.0 * context * width * vocabulary
    units.append(_unit("head", kinds, SHAPES[name], vocabulary * width, head_flop, saved_per_value=4))
    return Profile(name=name, units=tuple(units))


def _unit(
    name: str, kinds: dict[str, Device], shape: Shape, parameters: int, flop: float, saved_per_value: int = 2
) -> Unit:
    """Makes one unit; `saved_per_value` is the number of saved bytes per value of its context · width values."""
    values = shape.context * shape.width
    return Unit(
        name=name,
        times={kind: _time(device, parameters, flop, values) for kind, device in kinds.items()},
        flop=flop,
        parameter_bytes=_WEIGHT_BYTES * parameters,
        gradient_bytes=_GRADIENT_BYTES * parameters,
        optimizer_bytes=_OPTIMIZER_BYTES * parameters,
        activation_bytes=float(saved_per_value * values),
        boundary_bytes=2.0 * values,
    )


def _time(device: Device, parameters: int, flop: float, values: int) -> UnitTime:
    rate = (device.efficiency or EFFICIENCY) * (device.flop_per_s or _NO_RATE)
    memory_rate = device.memory_bytes_per_s or _NO_RATE
    forward = Cost(per_sample_s=flop / rate + 4 * values / memory_rate)
    weight = Cost(per_sample_s=forward.per_sample_s)
    return UnitTime(
        forward=forward,
        backward=Cost(per_sample_s=2 * forward.per_sample_s),
        weight_backward=weight,
        recompute=forward,
        update_s=parameters / (device.parameters_per_s or memory_rate / _UPDATE_TRAFFIC_BYTES),
    )
