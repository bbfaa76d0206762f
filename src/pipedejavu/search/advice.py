"""Advice: what to buy or change first, found by searching again on changed machines and with changed questions.

Nothing here is a formula: every gain is the difference between two searches.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

from pipedejavu.facts import Device, InputError, Link, Machine, Profile, Record, format_bytes
from pipedejavu.facts.quantity import Seconds
from pipedejavu.search.memory_limit import memory_limit_of, with_memory
from pipedejavu.search.search import search
from pipedejavu.search.search_options import Progress, SearchOptions
from pipedejavu.search.search_result import RankedPlan

LEAST_GAIN = 1.02
"""Below which a change is not worth a word."""
BUDGET_S = 20.0
"""For all changes together; those that are left then are named."""
DOUBT = 1.05
"""Times the estimate of the best plan, above which no plan with a change is looked at: it would hardly be faster."""
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


class Advised(NamedTuple):
    """Changes that would pay, the largest gain first, and what there was no time to look at."""

    found: tuple[Advice, ...]
    left: tuple[str, ...]
    """Changes as they follow 'with'."""


class _Change(NamedTuple):
    text: str
    machine: Machine
    options: SearchOptions
    type_: str = ""
    """Of the devices that have memory without a limit: how much is enough is to be found."""


def advise(
    profile: Profile,
    machine: Machine,
    options: SearchOptions,
    best: RankedPlan,
    progress: Progress | None = None,
    time_budget_s: float = BUDGET_S,
) -> Advised:
    """Returns changes that would pay, each found by a search of its own, the most promising first.

    They are those of `auto`, whoever found the best plan: a searcher that draws, or looks at all, would take very long.
    """
    until_s, is_auto, options = (
        time.monotonic() + time_budget_s,
        options.searcher == "auto",
        options.replace(searcher="auto"),
    )
    same = None if is_auto else _best(profile, machine, options)
    if same is not None and _score(same, options) < _score(best, options):
        best = same  # or the searcher's own gap would be taken for a gain
    plan, found, left = best.plan, list[Advice](), list[str]()
    links = [*_changes(machine, options)]
    rooms = [_more_memory(machine, options, type_) for type_ in _types(machine)]
    is_short = plan.keep.kind != "replicated" or plan.keep.activations == "host" or plan.order.has_recompute
    changes = [*rooms, *links] if is_short else [*links, *rooms]
    for index, change in enumerate(changes):
        told = _part(progress, index, len(changes), f"with {change.text}")
        other, is_sure = _with(profile, change, best, until_s, told)
        if other is not None and change.type_ and _gain(best, other, options) >= LEAST_GAIN:
            change = _enough(machine, change, other)  # of memory without a limit, as much as that plan needs
            other, is_sure = _with(profile, change, best, until_s, told)
        if other is not None and (gain := _gain(best, other, options)) >= LEAST_GAIN:
            found.append(Advice(change=change.text, time_s=other.time_s, samples=other.samples, gain=gain))
        elif not is_sure:
            left.append(change.text)
    return Advised(tuple(sorted(found, key=lambda advice: -advice.gain)), tuple(left))


def _with(
    profile: Profile, change: _Change, best: RankedPlan, until_s: float, progress: Progress | None
) -> tuple[RankedPlan | None, bool]:
    """Returns the best plan with a change, of those that may be better than without, and whether it is sure."""
    rest_s, options = until_s - time.monotonic(), change.options
    if rest_s <= 0:
        return None, False
    options = options.replace(time_budget_s=min(rest_s, options.time_budget_s), candidates=1)
    most = DOUBT * best.estimated_s * options.batch / best.samples
    if options.objective == "price":
        most *= 3600 * best.price / max(best.time_s, 1e-12)
    try:
        result = search(profile, change.machine, options, progress, most=most)
    except InputError:  # a machine that was changed may lack a link
        return None, True
    return result.best, result.is_complete


def _gain(best: RankedPlan, other: RankedPlan, options: SearchOptions) -> float:
    return _score(best, options) / max(_score(other, options), 1e-12)


def smallest_change(profile: Profile, machine: Machine, options: SearchOptions) -> str:
    """Returns what would have to change for anything to fit: a smaller batch if that is enough, and memory."""
    asked, ways = options.replace(candidates=1, searcher="dp"), []
    if asked.samples is not None and _best(profile, machine, asked.replace(samples=None)):
        ways.append("microbatches of another size (leave --samples out)")
    batch = asked.batch // 2
    while batch and not ways:
        if _best(profile, machine, asked.replace(batch=batch, samples=None)):
            ways.append(f"a batch of {batch} (--batch {batch})")
        batch //= 2
    for type_ in _types(machine):
        extra = _least_memory(profile, machine, asked, type_)
        if extra is not None:
            ways.append(f"{format_bytes(extra)} more memory on {_each(machine, type_)}")
    if options.is_runnable and not ways and _best(profile, machine, asked.replace(is_runnable=False)):
        ways.append("ZeRO or divided operators (--costed), which the engine does not run yet")
    return ", or ".join(ways)


def nothing_fits(profile: Profile, machine: Machine, options: SearchOptions, *, is_complete: bool = True) -> InputError:
    """Returns what to raise for a search without an answer: the smallest change that would fit, in a sentence."""
    if not is_complete:
        return InputError(
            f"no plan for {profile.name} with a batch of {options.batch} was found on machine '{machine.name}' in"
            f" {options.time_budget_s:g} s, and not all were looked at; give more time (--time-budget) or fewer devices"
        )
    change = smallest_change(profile, machine, options)
    what = f"no plan for {profile.name} with a batch of {options.batch} fits machine '{machine.name}'"
    return InputError(f"{what}; this would fit: {change}" if change else f"{what}, whatever its memory")


def _best(profile: Profile, machine: Machine, options: SearchOptions) -> RankedPlan | None:
    try:
        return search(profile, machine, options).best
    except InputError:  # a machine that was changed may lack a link
        return None


def _score(candidate: RankedPlan, options: SearchOptions) -> float:
    return candidate.price / candidate.samples if options.objective == "price" else candidate.time_per_sample_s


def _changes(machine: Machine, options: SearchOptions) -> Iterator[_Change]:
    """Yields changes that need no search to be named."""
    if not options.staleness:
        text = "weights that may be one update old (--staleness 1)"
        yield _Change(text, machine, options.replace(staleness=1))
    text = f"a batch of {2 * options.batch} (--batch {2 * options.batch})"
    yield _Change(text, machine, options.replace(batch=2 * options.batch))
    if len(machine.hosts) > 1:
        yield _Change("a network twice as fast", _faster(machine, "same-host"), options)
    yield _Change("links twice as fast inside a host", _faster(machine, "other-host"), options)
    if len(machine.hosts) == 1 and options.devices is None:
        kinds = {device.kind: device for device in machine.devices if device.type == "gpu"}
        for kind, device in kinds.items():
            yield _Change(f"one more {kind}", _with_another(machine, device), options)


def _faster(machine: Machine, beside: str) -> Machine:
    """Returns the machine with all links twice as fast but those of one scope."""
    links = tuple(link if link.scope == beside else _twice_as_fast(link) for link in machine.links)
    return machine.replace(links=links)


def _twice_as_fast(link: Link) -> Link:
    sums = link.sum_bytes_per_s
    return link.replace(bytes_per_s=2 * link.bytes_per_s, sum_bytes_per_s=2 * sums if sums else None)


def _with_another(machine: Machine, device: Device) -> Machine:
    """Returns the machine with one more device like one that it has, and links of its own."""
    new = device.replace(name=f"{device.name}+")
    links = []
    for link in machine.links:
        ends = {"source": link.source, "target": link.target}
        links += [link, *(link.replace(**{end: new.name}) for end, name in ends.items() if name == device.name)]
    return machine.replace(devices=(*machine.devices, new), links=tuple(links))


def _more_memory(machine: Machine, options: SearchOptions, type_: str) -> _Change:
    """Returns the change to memory without a limit."""
    roomy = with_memory(machine, times=MOST_MEMORY, types=(type_,))
    return _Change(f"more memory on {_each(machine, type_)}", roomy, options, type_)


def _enough(machine: Machine, change: _Change, roomy: RankedPlan) -> _Change:
    """Returns the change to the memory that the best plan has, were there no limit."""
    used = {need.device: need.reserved_bytes or need.need_bytes for need in roomy.memory}
    extra = 0.0
    for device in (d for d in machine.devices if d.type == change.type_):
        name = device.name
        need = sum(size for other, size in used.items() if other == name or other.rpartition(".")[0] == name)
        extra = max(extra, need - memory_limit_of(device))
    text = f"{format_bytes(extra)} {change.text}"
    return _Change(text, with_memory(machine, extra_bytes=extra, types=(change.type_,)), change.options)


def _part(progress: Progress | None, index: int, count: int, text: str) -> Progress | None:
    """Returns how far one of several searches is as how far all are."""
    return (lambda share, _: progress((index + share) / count, text)) if progress else None


def _least_memory(profile: Profile, machine: Machine, options: SearchOptions, type_: str) -> float | None:
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
    return (high - 1) * max(memory_limit_of(d) for d in machine.devices if d.type == type_)


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
