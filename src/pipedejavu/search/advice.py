"""Advice: what to buy or change first, found by searching again on changed machines and with changed questions.

Nothing here is a formula: every gain is the difference between two searches.
"""

from collections.abc import Iterator
from typing import NamedTuple

from pipedejavu.facts import Device, InputError, Machine, Profile, Record, format_bytes
from pipedejavu.facts.quantity import Seconds
from pipedejavu.search.option import Options, Progress
from pipedejavu.search.result import Candidate
from pipedejavu.search.room import room_of, with_memory
from pipedejavu.search.search import search

LEAST_GAIN = 1.02
"""Below which a change is not worth a word."""
MOST_MEMORY = 2.0**20
"""Times what is there: more than any machine will have."""
NEAR = 1.02
"""How near the least memory that fits is found."""


class Advice(Record):
    """A change, and what it is predicted to bring."""

    change: str
    """As it follows 'with': '8.0 GiB more memory on each a100'."""
    time_s: Seconds
    """Of one update, with the change."""
    samples: int
    """Of one update, with the change."""
    gain: float
    """How many times faster, or cheaper, a sample is."""


class _Change(NamedTuple):
    text: str
    machine: Machine
    options: Options


def advise(
    profile: Profile, machine: Machine, options: Options, best: Candidate, progress: Progress | None = None
) -> tuple[Advice, ...]:
    """Returns changes that would pay, the largest gain first; each takes one search, so all take a while.

    They are those of `auto`, whoever found the best plan: a searcher that draws, or looks at all, would take very long.
    """
    found, is_auto, options = [], options.searcher == "auto", options.but(searcher="auto")
    same = None if is_auto else _best(profile, machine, options)
    if same is not None and _score(same, options) < _score(best, options):
        best = same  # or the searcher's own gap would be taken for a gain
    changes = [*_changes(machine, options), *_memory_changes(profile, machine, options)]
    for index, change in enumerate(changes):
        if progress:
            progress(index / len(changes), f"with {change.text}")
        other = _best(profile, change.machine, change.options)
        if other is None:
            continue
        gain = _score(best, options) / max(_score(other, options), 1e-12)
        if gain >= LEAST_GAIN:
            found.append(Advice(change=change.text, time_s=other.time_s, samples=other.samples, gain=gain))
    return tuple(sorted(found, key=lambda advice: -advice.gain))


def smallest_change(profile: Profile, machine: Machine, options: Options) -> str:
    """Returns what would have to change for anything to fit: a smaller batch if that is enough, and memory."""
    asked, ways = options.but(candidates=1, searcher="dp"), []
    if asked.samples is not None and _best(profile, machine, asked.but(samples=None)):
        ways.append("microbatches of another size (leave --samples out)")
    batch = asked.batch // 2
    while batch and not ways:
        if _best(profile, machine, asked.but(batch=batch, samples=None)):
            ways.append(f"a batch of {batch} (--batch {batch})")
        batch //= 2
    for type_ in _types(machine):
        extra = _least_memory(profile, machine, asked, type_)
        if extra is not None:
            ways.append(f"{format_bytes(extra)} more memory on {_each(machine, type_)}")
    if options.is_runnable and not ways and _best(profile, machine, asked.but(is_runnable=False)):
        ways.append("ZeRO or divided operators (--costed), which the engine does not run yet")
    return ", or ".join(ways)


def nothing_fits(profile: Profile, machine: Machine, options: Options) -> InputError:
    """Returns what to raise for a search without an answer: the smallest change that would fit, in a sentence."""
    change = smallest_change(profile, machine, options)
    what = f"no plan for {profile.name} with a batch of {options.batch} fits machine '{machine.name}'"
    return InputError(f"{what}; this would fit: {change}" if change else f"{what}, whatever its memory")


def _best(profile: Profile, machine: Machine, options: Options) -> Candidate | None:
    try:
        return search(profile, machine, options).best
    except InputError:  # a machine that was changed may lack a link
        return None


def _score(candidate: Candidate, options: Options) -> float:
    return candidate.price / candidate.samples if options.objective == "price" else candidate.time_per_sample_s


def _changes(machine: Machine, options: Options) -> Iterator[_Change]:
    """Yields changes that need no search to be named."""
    if not options.staleness:
        text = "weights that may be one update old (--staleness 1)"
        yield _Change(text, machine, options.but(staleness=1))
    text = f"a batch of {2 * options.batch} (--batch {2 * options.batch})"
    yield _Change(text, machine, options.but(batch=2 * options.batch))
    if len(machine.hosts) > 1:
        yield _Change("a network twice as fast", _faster(machine, "same-host"), options)
    yield _Change("links twice as fast inside a host", _faster(machine, "other-host"), options)
    if len(machine.hosts) == 1 and options.devices is None:
        kinds = {device.kind: device for device in machine.devices if device.type == "gpu"}
        for kind, device in kinds.items():
            yield _Change(f"one more {kind}", _with_another(machine, device), options)


def _faster(machine: Machine, beside: str) -> Machine:
    """Returns the machine with all links twice as fast but those of one scope."""
    links = (k if k.scope == beside else k.but(bytes_per_s=2 * k.bytes_per_s) for k in machine.links)
    return machine.but(links=tuple(links))


def _with_another(machine: Machine, device: Device) -> Machine:
    """Returns the machine with one more device like one that it has, and links of its own."""
    new = device.but(name=f"{device.name}+")
    links = []
    for link in machine.links:
        ends = {"source": link.source, "target": link.target}
        links += [link, *(link.but(**{end: new.name}) for end, name in ends.items() if name == device.name)]
    return machine.but(devices=(*machine.devices, new), links=tuple(links))


def _memory_changes(profile: Profile, machine: Machine, options: Options) -> Iterator[_Change]:
    """Yields for each type of device the memory that the best plan would have, were there no limit."""
    for type_ in _types(machine):
        roomy = _best(profile, with_memory(machine, times=MOST_MEMORY, types=(type_,)), options)
        if roomy is None:
            continue
        used = {need.device: need.need_bytes for need in roomy.memory}
        parts = {d.name: d for d in machine.devices if d.type == type_}
        extra = 0.0
        for name, device in parts.items():
            need = sum(size for other, size in used.items() if other == name or other.rpartition(".")[0] == name)
            extra = max(extra, need - room_of(device))
        if extra > 0:
            text = f"{format_bytes(extra)} more memory on {_each(machine, type_)}"
            yield _Change(text, with_memory(machine, extra_bytes=extra, types=(type_,)), options)


def _least_memory(profile: Profile, machine: Machine, options: Options, type_: str) -> float | None:
    """Returns how many bytes more on each device of a type let something fit; None where none would."""
    if not _best(profile, with_memory(machine, times=MOST_MEMORY, types=(type_,)), options):
        return None
    low, high = 1.0, 2.0
    while not _best(profile, with_memory(machine, times=high, types=(type_,)), options):
        low, high = high, 2 * high
    while high / low > NEAR:
        middle = (low * high) ** 0.5
        if _best(profile, with_memory(machine, times=middle, types=(type_,)), options):
            high = middle
        else:
            low = middle
    return (high - 1) * max(room_of(d) for d in machine.devices if d.type == type_)


def _types(machine: Machine) -> list[str]:
    return sorted({device.type for device in machine.devices}, reverse=True)


def _each(machine: Machine, type_: str) -> str:
    """Names the devices of a type."""
    kinds = list(dict.fromkeys(d.kind for d in machine.devices if d.type == type_))
    count = sum(d.type == type_ for d in machine.devices)
    if type_ == "cpu":
        return "the host" if count == 1 else "each host"
    name = kinds[0] if len(kinds) == 1 else "GPU"
    return f"the {name}" if count == 1 else f"each {name}"
