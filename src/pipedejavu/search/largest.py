"""The largest batch of one pass, number of a model's repeated blocks, or context, that fits.

Candidates are bracketed and bisected by `is_feasible`, which estimates memory alone. Only the result is confirmed by a
`search`, and again after each step down, as the simulator may need more memory than the estimate.
"""

from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

from pipedejavu.facts import InputError, Machine, Profile, Unit, format_bytes
from pipedejavu.search.advice import nothing_fits
from pipedejavu.search.feasibility import is_feasible
from pipedejavu.search.planning_problem import usable, worthwhile
from pipedejavu.search.search import search
from pipedejavu.search.search_options import Progress, SearchOptions

MOST = 2**16
"""Upper limit of the numbers tried."""
TOKENS = 256
"""A context is a multiple of this."""
NEAR = 64
"""The largest number is found within 1/64 of it."""


class Largest(NamedTuple):
    """The largest problem that fits, and a sentence that says so."""

    profile: Profile
    options: SearchOptions
    text: str


def find_largest(
    profile: Profile,
    machine: Machine,
    options: SearchOptions,
    progress: Progress | None = None,
    with_context: Callable[[int], Profile] | None = None,
) -> Largest | None:
    """Returns the largest problem that fits, for the objectives `batch`, `blocks` and `context`; None for the others.

    `with_context` returns the profile of the model with another number of tokens per sample, if it can have one.
    Devices too slow to be worthwhile hold state and train nothing, however much memory they have. Raises InputError
    if even the smallest problem does not fit, or if the model's blocks cannot be multiplied or its context changed.
    """
    if options.objective not in ("batch", "blocks", "context"):
        return None

    names = worthwhile(profile, machine, usable(profile, machine, options))
    options = options.replace(devices=names)

    def fits(profile: Profile, options: SearchOptions, *, is_sure: bool) -> bool:
        if progress:
            progress(0.0, f"{profile.name}, a batch of {options.batch}, {len(profile.units)} units")
        if not is_sure:
            return is_feasible(profile, machine, options)
        return search(profile, machine, options.replace(candidates=1)).best is not None

    if options.objective == "blocks":
        start, run = _blocks(profile)
        count = _most(lambda n, sure: fits(_with_blocks(profile, start, run, n), options, is_sure=sure))
        if not count:
            raise nothing_fits(_with_blocks(profile, start, run, 1), machine, options)
        larger = _with_blocks(profile, start, run, count)
        many, weights = (sum(getattr(u, name) for u in larger.units) for name in ("num_parameters", "parameter_bytes"))
        size = f"{many:,} parameters" if many else f"{format_bytes(weights)} of weights"
        text = f"{count} blocks like {profile.units[start].name} fit, where the model has {run}: {size}"
        return Largest(larger, options, text)
    if options.objective == "context":
        if with_context is None:
            raise InputError(
                "objective 'context' needs a model whose context can be changed; give it by its shape, such as gpt-1.3b"
            )
        count = _most(lambda n, sure: fits(with_context(n * TOKENS), options, is_sure=sure))
        if not count:
            raise nothing_fits(with_context(TOKENS), machine, options)
        text = f"a context of {count * TOKENS:,} tokens is the longest that fits, in steps of {TOKENS}"
        return Largest(with_context(count * TOKENS), options, text)
    step = max(sum(machine.device(name).type == "gpu" for name in names), 1)
    whole = options.replace(samples=None)
    count = _most(lambda n, sure: fits(profile, whole.replace(batch=n * step), is_sure=sure))
    if not count:
        raise nothing_fits(profile, machine, whole.replace(batch=step))
    text = f"a batch of {count * step} is the largest that fits in one pass, in steps of {step}"
    return Largest(profile, whole.replace(batch=count * step), text)


def _most(fits: Callable[[int, bool], bool]) -> int:
    """Returns the largest number that fits, assuming that all smaller ones do; 0 if 1 does not.

    `fits` takes a number and whether to be sure. The number is found by estimates, and lowered until it surely fits.
    """
    if not fits(1, False):
        return 0
    low, high = 1, 2
    while high <= MOST and fits(high, False):
        low, high = high, 2 * high
    while high - low > max(1, low // NEAR):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle, False) else (low, middle)
    while low and not fits(low, True):
        low -= max(1, low // NEAR)
    return low


def _blocks(profile: Profile) -> tuple[int, int]:
    """Returns the start and the length of the longest run of equal units."""
    if profile.edges is not None or profile.ties:
        raise InputError(
            f"profile '{profile.name}' has values or parameters that pass its units by, so its blocks cannot be"
            " multiplied; use --objective batch"
        )
    runs, start = [], 0
    for _, equal in groupby(profile.units, key=_unit_key):
        runs.append((start, len([*equal])))
        start += runs[-1][1]
    return max(runs, key=lambda run: run[1])


def _unit_key(unit: Unit) -> tuple[float, ...]:
    return unit.num_parameters, unit.parameter_bytes, unit.activation_bytes, unit.boundary_bytes


def _copy(unit: Unit, number: int) -> Unit:
    return unit.replace(name=f"{unit.name}+{number}")


def _with_blocks(profile: Profile, start: int, run: int, count: int) -> Profile:
    """Returns the model with a run of equal units replaced by `count` of them."""
    block, rest = profile.units[start : start + run], profile.units[start + run :]
    blocks = [block[n] if n < run else _copy(block[n % run], n // run) for n in range(count)]
    name = f"{profile.name} with {count} blocks"
    return profile.replace(name=name, units=(*profile.units[:start], *blocks, *rest), begins=())
