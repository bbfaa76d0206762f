"""The largest that fits: the batch of one pass, or the number of a model's repeated blocks; found by searches."""

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
"""Beyond which nobody asks."""
NEAR = 64
"""The largest number is found within so many parts of it."""


class Largest(NamedTuple):
    """A question whose answer fits, while that of a larger one does not."""

    profile: Profile
    options: SearchOptions
    text: str


def find_largest(
    profile: Profile, machine: Machine, options: SearchOptions, progress: Progress | None = None
) -> Largest | None:
    """Returns the largest question that has an answer, for the objectives `batch` and `blocks`; None for the others.

    Devices that are too slow to be of use beside the others keep state and train nothing, however large they are.
    Raises InputError where even the smallest fits nowhere, or where a model's blocks cannot be counted.
    """
    if options.objective not in ("batch", "blocks"):
        return None

    names = worthwhile(profile, machine, usable(profile, machine, options))
    options = options.replace(devices=names)

    def fits(profile: Profile, options: SearchOptions, *, is_sure: bool) -> bool:
        if progress:
            progress(0.0, f"a batch of {options.batch}, {len(profile.units)} units")
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
    step = max(sum(machine.device(name).type == "gpu" for name in names), 1)
    whole = options.replace(samples=None)
    count = _most(lambda n, sure: fits(profile, whole.replace(batch=n * step), is_sure=sure))
    if not count:
        raise nothing_fits(profile, machine, whole.replace(batch=step))
    text = f"a batch of {count * step} is the largest that fits in one pass, in steps of {step}"
    return Largest(profile, whole.replace(batch=count * step), text)


def _most(fits: Callable[[int, bool], bool]) -> int:
    """Returns the largest number that fits, all smaller ones taken to fit too; 0 where 1 does not.

    `fits` takes a number and whether to be sure: it is found by estimates, and comes down until it is sure.
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
    """Returns where the longest run of units that are alike begins, and how long it is."""
    if profile.edges is not None or profile.ties:
        raise InputError(
            f"profile '{profile.name}' has values or parameters that pass its units by, so its blocks cannot be"
            " multiplied; use --objective batch"
        )
    runs, start = [], 0
    for _, alike in groupby(profile.units, key=_likeness):
        runs.append((start, len([*alike])))
        start += runs[-1][1]
    return max(runs, key=lambda found: found[1])


def _likeness(unit: Unit) -> tuple[float, ...]:
    return unit.num_parameters, unit.parameter_bytes, unit.activation_bytes, unit.boundary_bytes


def _with_blocks(profile: Profile, start: int, run: int, count: int) -> Profile:
    """Returns the model with so many units in place of a run of units that are alike."""
    own, rest = profile.units[start : start + run], profile.units[start + run :]
    blocks = [own[n] if n < run else own[n % run].replace(name=f"{own[n % run].name}+{n // run}") for n in range(count)]
    name = f"{profile.name} with {count} blocks"
    return profile.replace(name=name, units=(*profile.units[:start], *blocks, *rest), begins=())
