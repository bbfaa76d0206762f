"""Advice: which change of the machine or the options would pay most.

Every gain is the ratio of two searches, so each change costs one `search` (memory costs two: one without a limit, and
one with as much as that plan needs). `max_score` lets these searches skip plans that would hardly be faster.
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
"""Least gain that is reported."""
BUDGET_S = 20.0
"""Time for all changes together; changes that are left then are listed."""
DOUBT = 1.05
"""Plans with a change are skipped if their estimate is above this multiple of the best plan's."""
MOST_MEMORY = 2.0**20
"""Factor that stands for unlimited memory."""
NEAR = 1.02
"""Relative precision of the least memory that fits."""


class Advice(Record):
    """A change and its predicted gain."""

    change: str
    """Text that can follow 'with': '8.0 GiB more memory on each a100'."""
    time_s: Seconds
    """Time of one update with the change."""
    samples: int
    """Samples per update with the change."""
    gain: float
    """Ratio of the times, or prices, per sample without and with the change."""


class Advised(NamedTuple):
    """Changes that would pay, the largest gain first, and those that there was no time for."""

    found: tuple[Advice, ...]
    left: tuple[str, ...]
    """Changes without a result, as texts that can follow 'with'."""


class _Change(NamedTuple):
    text: str
    machine: Machine
    options: SearchOptions
    type_: str = ""
    """Type of the devices with unlimited memory; empty if the change is complete."""


def advise(
    profile: Profile,
    machine: Machine,
    options: SearchOptions,
    best: RankedPlan,
    progress: Progress | None = None,
    time_budget_s: float = BUDGET_S,
) -> Advised:
    """Returns changes that would pay, each confirmed by a search.

    All searches use `auto`, also if another searcher found the best plan: the random and the exhaustive ones are slow.
    """
    until_s, is_auto = time.monotonic() + time_budget_s, options.searcher == "auto"
    options = options.replace(searcher="auto")
    # Another searcher may have missed the best plan; without this search its gap would count as a gain.
    same = None if is_auto else _best(profile, machine, options)
    if same is not None and _score(same, options) < _score(best, options):
        best = same
    plan, advice, left = best.plan, list[Advice](), list[str]()
    links = [*_changes(machine, options)]
    memory = [_more_memory(machine, options, type_) for type_ in _types(machine)]
    is_short = plan.keep.kind != "replicated" or plan.keep.activations == "host" or plan.order.has_recompute
    changes = [*memory, *links] if is_short else [*links, *memory]
    for index, change in enumerate(changes):
        report = _part(progress, index, len(changes), f"with {change.text}")
        other, is_sure = _with(profile, change, best, until_s, report)
        if other is not None and change.type_ and _gain(best, other, options) >= LEAST_GAIN:
            change = _enough(machine, change, other)  # as much memory as that plan needs
            other, is_sure = _with(profile, change, best, until_s, report)
        if other is not None and (gain := _gain(best, other, options)) >= LEAST_GAIN:
            advice.append(Advice(change=change.text, time_s=other.time_s, samples=other.samples, gain=gain))
        elif not is_sure:
            left.append(change.text)
    return Advised(tuple(sorted(advice, key=lambda item: -item.gain)), tuple(left))


def _with(
    profile: Profile, change: _Change, best: RankedPlan, until_s: float, progress: Progress | None
) -> tuple[RankedPlan | None, bool]:
    """Returns the best plan with a change, if one may be better, and whether the search was complete."""
    rest_s, options = until_s - time.monotonic(), change.options
    if rest_s <= 0:
        return None, False
    options = options.replace(time_budget_s=min(rest_s, options.time_budget_s), candidates=1)
    max_score = DOUBT * best.estimated_s * options.batch / best.samples
    if options.objective == "price":
        max_score *= 3600 * best.price / max(best.time_s, 1e-12)
    try:
        result = search(profile, change.machine, options, progress, max_score=max_score)
    except InputError:  # the changed machine may lack a link
        return None, True
    return result.best, result.is_complete


def _gain(best: RankedPlan, other: RankedPlan, options: SearchOptions) -> float:
    return _score(best, options) / max(_score(other, options), 1e-12)


def smallest_change(profile: Profile, machine: Machine, options: SearchOptions) -> str:
    """Returns what would have to change for anything to fit: a smaller batch if that is enough, and memory.

    The batch is halved, and memory bisected; each step is a search.
    """
    asked, changes = options.replace(candidates=1, searcher="dp"), []
    if asked.samples is not None and _best(profile, machine, asked.replace(samples=None)):
        changes.append("microbatches of another size (leave --samples out)")
    batch = asked.batch // 2
    while batch and not changes:
        if _best(profile, machine, asked.replace(batch=batch, samples=None)):
            changes.append(f"a batch of {batch} (--batch {batch})")
        batch //= 2
    for type_ in _types(machine):
        extra = _least_memory(profile, machine, asked, type_)
        if extra is not None:
            changes.append(f"{format_bytes(extra)} more memory on {_each(machine, type_)}")
    if options.is_runnable and not changes and _best(profile, machine, asked.replace(is_runnable=False)):
        changes.append(
            "a plan that is only costed (--costed), such as one with tensor-parallel groups of several sizes"
        )
    return ", or ".join(changes)


def nothing_fits(profile: Profile, machine: Machine, options: SearchOptions, *, is_complete: bool = True) -> InputError:
    """Returns the error for a search that found no plan; it names the smallest change that would fit."""
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
    except InputError:  # the changed machine may lack a link
        return None


def _score(candidate: RankedPlan, options: SearchOptions) -> float:
    return candidate.price / candidate.samples if options.objective == "price" else candidate.time_per_sample_s


def _changes(machine: Machine, options: SearchOptions) -> Iterator[_Change]:
    """Yields the changes that are known without a search."""
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


def _faster(machine: Machine, excepted: str) -> Machine:
    """Returns the machine with all links twice as fast, except those of one scope."""
    links = tuple(link if link.scope == excepted else _twice_as_fast(link) for link in machine.links)
    return machine.replace(links=links)


def _twice_as_fast(link: Link) -> Link:
    sums = link.sum_bytes_per_s
    return link.replace(bytes_per_s=2 * link.bytes_per_s, sum_bytes_per_s=2 * sums if sums else None)


def _with_another(machine: Machine, device: Device) -> Machine:
    """Returns the machine with a copy of one of its devices, with the same links."""
    new = device.replace(name=f"{device.name}+")
    links = []
    for link in machine.links:
        ends = {"source": link.source, "target": link.target}
        links += [link, *(link.replace(**{end: new.name}) for end, name in ends.items() if name == device.name)]
    return machine.replace(devices=(*machine.devices, new), links=tuple(links))


def _more_memory(machine: Machine, options: SearchOptions, type_: str) -> _Change:
    """Returns the change to unlimited memory on one type of device."""
    unlimited = with_memory(machine, times=MOST_MEMORY, types=(type_,))
    return _Change(f"more memory on {_each(machine, type_)}", unlimited, options, type_)


def _enough(machine: Machine, change: _Change, best: RankedPlan) -> _Change:
    """Returns the change to as much memory as the best plan without a limit needs."""
    used = {need.device: need.reserved_bytes or need.need_bytes for need in best.memory}
    extra = 0.0
    for device in (d for d in machine.devices if d.type == change.type_):
        name = device.name
        need = sum(size for other, size in used.items() if other == name or other.rpartition(".")[0] == name)
        extra = max(extra, need - memory_limit_of(device))
    text = f"{format_bytes(extra)} {change.text}"
    return _Change(text, with_memory(machine, extra_bytes=extra, types=(change.type_,)), change.options)


def _part(progress: Progress | None, index: int, count: int, text: str) -> Progress | None:
    """Returns the progress callback of one of several searches."""
    return (lambda share, _: progress((index + share) / count, text)) if progress else None


def _least_memory(profile: Profile, machine: Machine, options: SearchOptions, type_: str) -> float | None:
    """Returns the least extra bytes per device of a type with which something fits; None if no amount helps."""
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
    """Returns the name of the devices of a type, with an article."""
    kinds = list(dict.fromkeys(d.kind for d in machine.devices if d.type == type_))
    count = sum(d.type == type_ for d in machine.devices)
    if type_ == "cpu":
        return "the host" if count == 1 else "each host"
    name = kinds[0] if len(kinds) == 1 else "GPU"
    return f"the {name}" if count == 1 else f"each {name}"
