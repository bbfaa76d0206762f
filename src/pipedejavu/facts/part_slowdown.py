"""Parts of a CPU that several workers share: their kinds, and estimated times for parts that were not measured.

One of n parts has its own kind, such as 'cpu/2', under which it can be measured. If it was not, its times are those of
the whole CPU, multiplied by the ratio of the surveyed rates at the two numbers of threads, or by n without such rates.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from pipedejavu.facts.machine import Device, Machine
from pipedejavu.facts.measurement import Survey
from pipedejavu.facts.profile import Profile, UnitTime

_SETTING = re.compile(r"(?P<what>.*), (?P<threads>[1-9]\d{0,5}) threads")
_KIND = re.compile(r"(?P<whole>.+)/(?P<count>[1-9]\d{0,5})")


class Slowdown(NamedTuple):
    """How many times slower a part is than its whole CPU."""

    compute: float
    update: float
    threads: tuple[int, int] | None
    """Threads of the part and of the whole whose rates were compared; None if the factor is the number of parts."""

    def times(self, time: UnitTime) -> UnitTime:
        """Returns the part's time for what takes `time` on the whole CPU."""
        return time.times(self.compute).replace(update_s=time.update_s * self.update)


def slowdown(survey: Survey | None, cpu: str, count: int) -> Slowdown:
    """Returns the slowdown of one of `count` parts of a CPU from a survey, between 1 and `count`."""
    block, update = (_rates(survey, cpu, what) if survey else {} for what in ("block", "update"))
    if any(min(rates, default=0) != 1 or len(rates) < 2 for rates in (block, update)):
        return Slowdown(float(count), float(count), None)
    whole = max(block)
    return Slowdown(_longer(block, count), _longer(update, count), (max(1, whole // count), whole))


def with_part_times(profile: Profile, machine: Machine) -> tuple[Profile, tuple[str, ...]]:
    """Returns the profile with times on each kind of part of a CPU, and a sentence per kind on where they come from.

    Existing times stay; a part gets no times if its whole CPU has none.
    """
    sentences = []
    for kind, device in {device.kind: device for device in machine.devices}.items():
        match = _KIND.fullmatch(kind) if device.type == "cpu" else None
        if match is None:
            continue
        whole, count = match["whole"], int(match["count"])
        if all(kind in unit.times for unit in profile.units):
            sentences.append(f"it has times on {kind}, and these hold")
        elif all(whole in unit.times for unit in profile.units):
            slower = slowdown(machine.survey, _whole_name(device), count)
            profile = _with_kind(profile, kind, whole, slower)
            cores = next(host.cores for host in machine.hosts if host.name == device.host)
            remedy = f"; `profile --parts {count}` measures them" if count <= cores else ""
            sentences.append(_sentence(kind, whole, count, slower) + remedy)
    return profile, tuple(sentences)


def _with_kind(profile: Profile, kind: str, whole: str, slower: Slowdown) -> Profile:
    """Returns the profile with times added for one kind of part."""
    units = tuple(unit.replace(times={kind: slower.times(unit.times[whole])} | unit.times) for unit in profile.units)
    batch, drift = profile.batch, profile.drift
    if whole in batch:
        batch = {kind: batch[whole].times(slower.compute)} | batch
    if whole in drift:
        drift = {kind: drift[whole]} | drift
    return profile.replace(units=units, batch=batch, drift=drift)


def _whole_name(part: Device) -> str:
    return part.name.rpartition(".")[0]


def _sentence(kind: str, whole: str, count: int, slower: Slowdown) -> str:
    if slower.threads is None:
        how = f"those on {whole} are taken {count} times, the most that one part of {count} takes"
    else:
        part, all_ = slower.threads
        how = (
            f"those on {whole} are taken {slower.compute:.2f} times, and of updates {slower.update:.2f} times, as"
            f" the machine's rates with {part} and {all_} threads differ"
        )
    return f"it has no times on {kind}; {how}"


def _rates(survey: Survey, cpu: str, what: str) -> dict[int, float]:
    """Returns a CPU's measured rates by number of threads, for the setting with the most measurements."""
    by_setting: dict[str, dict[int, float]] = {}
    for row in survey.measurements:
        setting = _SETTING.fullmatch(row.setting) if (row.subject, row.what) == (cpu, what) else None
        if setting and row.value > 0:
            by_setting.setdefault(setting["what"], {})[int(setting["threads"])] = row.value
    return max(by_setting.values(), key=len, default={})


def _longer(rates: Mapping[int, float], count: int) -> float:
    whole = max(rates)
    return min(max(rates[whole] / _rate(rates, max(1, whole // count)), 1.0), float(count))


def _rate(rates: Mapping[int, float], threads: int) -> float:
    """Returns the rate at a number of threads, interpolated as a power law between measured numbers."""
    low, high = max(n for n in rates if n <= threads), min(n for n in rates if n >= threads)
    share = math.log(threads / low) / math.log(high / low) if low < high else 0.0
    return rates[low] * math.pow(rates[high] / rates[low], share)
