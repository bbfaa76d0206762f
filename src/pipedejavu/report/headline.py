"""The figures that a report leads with: throughput, use of the hardware, time, and cost."""

from contextlib import suppress
from typing import NamedTuple

from pipedejavu.facts import InputError, format_seconds, known_device
from pipedejavu.program import Program

_PASSES = 3
"""FLOP of a forward and its backward, in those of the forward."""


class Headline(NamedTuple):
    """A figure with its name, and what it means."""

    name: str
    value: str
    aside: str


def flop_share(program: Program, samples_per_s: float) -> float | None:
    """Returns the model FLOP utilisation over all devices; None unless FLOP and peaks are known.

    None, too, if it would exceed 1: the known peak is then that of a slower format than the one that is computed in.
    """
    flop = _PASSES * sum(unit.flop for unit in program.profile.units) * samples_per_s
    peak = 0.0
    for name in program.devices:
        device = program.machine.device(name)
        device_peak = device.flop_per_s
        with suppress(InputError):
            device_peak = device_peak or known_device(device.kind).flop_per_s
        if not device_peak:
            return None
        peak += device_peak
    return flop / peak if flop and 0 < flop <= peak else None


def headlines(
    program: Program,
    samples_per_s: float,
    time: Headline,
    *,
    tokens_per_sample: float | None = None,
    forecast: float | None = None,
    cost: tuple[float, float] | None = None,
) -> list[Headline]:
    """Returns throughput, MFU, the time and the cost; `cost` is the price per hour and the hours, `forecast` a rate."""
    beside = "" if forecast is None else f", forecast {_number(forecast)}"
    rate = Headline("Samples per second", _number(samples_per_s), f"forward, backward and update{beside}")
    if tokens_per_sample is not None:
        tokens = f"{samples_per_s * tokens_per_sample:,.0f}"
        rate = Headline("Tokens per second", tokens, f"{_number(samples_per_s)} samples per second{beside}")
    share = flop_share(program, samples_per_s)
    mfu = Headline("MFU", "–", "not known: a device's peak or the model's FLOP")
    if share is not None:
        mfu = Headline("MFU", f"{share:.1%}", "of the devices' peak FLOP/s")
    price = Headline("Cost", "–", "known with train --price")
    if cost is not None:
        price = Headline("Cost", f"{cost[0] * cost[1]:,.2f}", f"{cost[0]:g} per hour")
    return [rate, mfu, time, price]


def step_time(program: Program, makespan_s: float) -> Headline:
    """Returns the time of an update of a program that is not run, and what 1,000 of them take."""
    step_s = makespan_s / program.plan.steps
    return Headline("Time per update", format_seconds(step_s), f"1,000 updates take {format_seconds(1000 * step_s)}")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
