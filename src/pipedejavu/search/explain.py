"""What to change: how much faster another machine would be, and the least that would make a plan fit.

Both ask the exact search for estimates on changed machines; nothing is simulated.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from math import inf

from pipedejavu.facts import Device, Machine, Profile, format_bytes, format_seconds
from pipedejavu.search import dp
from pipedejavu.search.option import Options
from pipedejavu.search.pool import Pool
from pipedejavu.search.scene import scenes_of
from pipedejavu.search.share import offer_shares

GAINS = 1.05
"""Times faster from which a change is worth naming."""
FACTORS = (1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
STEPS = 5
"""Halvings of the interval in which the least sufficient memory lies."""


@dataclass(frozen=True)
class Change:
    """One change of the machine or the batch, and what an update would be estimated at."""

    text: str
    time_s: float
    factor: float
    """How many times faster a sample would be; infinite where nothing fits now."""

    def __str__(self) -> str:
        if self.factor == inf:
            return f"{self.text}: it would fit, at an estimated {format_seconds(self.time_s)} an update"
        return f"{self.text}: {self.factor:.2g}× faster"


def least_estimate(profile: Profile, machine: Machine, options: Options) -> float:
    """Returns the least estimate of an update's time, infinite where nothing fits."""
    pool, scenes = Pool(options), [*scenes_of(profile, machine, options)]
    offer_shares(pool, scenes, options)
    dp.run(pool, scenes, options)
    return pool.best


def explain(profile: Profile, machine: Machine, options: Options) -> tuple[Change, ...]:
    """Returns changes of the machine that make updates faster, the most helpful first."""
    now = least_estimate(profile, machine, options)
    changes = []
    for text, other in _machines(machine):
        time_s = least_estimate(profile, other, options)
        if time_s * GAINS < now:
            changes.append(Change(text, time_s, now / time_s))
    return tuple(sorted(changes, key=lambda change: change.time_s))


def _machines(machine: Machine) -> Iterator[tuple[str, Machine]]:
    for type_, name in (("gpu", "GPU"), ("cpu", "host")):
        sizes = [d.memory_bytes for d in machine.devices if d.type == type_]
        if sizes:
            more = format_bytes(min(sizes) / 2)
            yield f"with {more} more memory on each {name}", with_memory(machine, (type_,), 1.5)
    yield (
        "with links of twice the rate",
        machine.but(
            links=tuple(
                link.but(bytes_per_s=2 * link.bytes_per_s, latency_s=link.latency_s / 2) for link in machine.links
            )
        ),
    )


def with_memory(machine: Machine, types: Collection[str], factor: float) -> Machine:
    """Returns the machine with so many times the memory on devices of some types."""

    def larger(device: Device) -> Device:
        return device.but(memory_bytes=round(device.memory_bytes * factor)) if device.type in types else device

    return machine.but(devices=tuple(map(larger, machine.devices)))


def nearest_fit(profile: Profile, machine: Machine, options: Options) -> tuple[Change, ...]:
    """Returns the smallest changes that would make a plan fit, each alone: memory of each type, a smaller batch."""
    found = []
    for type_, name in (("gpu", "GPU"), ("cpu", "host")):
        sizes = [d.memory_bytes for d in machine.devices if d.type == type_]
        if not sizes:
            continue

        def estimated(factor: float, type_: str = type_) -> float:
            return least_estimate(profile, with_memory(machine, (type_,), factor), options)

        factor = _least_factor(estimated)
        if factor is not None:
            more = format_bytes(min(sizes) * (factor - 1))
            found.append(Change(f"with {more} more memory on each {name}", estimated(factor), inf))
    batch = options.batch // 2
    while batch >= 1:
        smaller = options.but(batch=batch, samples=None)
        time_s = least_estimate(profile, machine, smaller)
        if time_s < inf:
            found.append(Change(f"with a batch of {batch} samples in place of {options.batch}", time_s, inf))
            break
        batch //= 2
    return tuple(found)


def _least_factor(estimated: Callable[[float], float]) -> float | None:
    """Returns the least factor at which something fits, to a thirty-second of the way between two that were tried."""
    low = 1.0
    for high in FACTORS:
        if estimated(high) < inf:
            break
        low = high
    else:
        return None
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if estimated(middle) < inf else (middle, high)
    return high
