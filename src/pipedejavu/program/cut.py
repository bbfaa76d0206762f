"""Cuts: divides a profile's units into stages, and stages into the pieces that actions name."""

from collections.abc import Callable
from itertools import pairwise
from math import inf

from pipedejavu.facts import Device, InputError, Profile
from pipedejavu.plan import Plan
from pipedejavu.program.program import Piece


def balance(profile: Profile, devices: list[Device], samples: int) -> tuple[int, ...]:
    """Returns the stage bounds that minimise the time of the slowest stage, with stage k on devices[k].

    Among those cuts it takes the most balanced one: the least sum of squared stage times.
    """
    units, stages = len(profile.units), len(devices)
    if stages == units:
        return tuple(range(1, units))
    totals = [_running_totals(profile, device.kind, samples) for device in devices]
    slowest, _ = _divide(totals, max)
    _, bounds = _divide(totals, lambda before, time: before + time * time, limit=slowest)
    return bounds


def _running_totals(profile: Profile, kind: str, samples: int) -> list[float]:
    """Returns the forward and backward time of the first 0, 1, 2, … units on a kind of device."""
    totals = [0.0]
    for unit in profile.units:
        time = profile.time(unit, kind)
        totals.append(totals[-1] + time.forward.at(samples) + time.backward.at(samples))
    return totals


def _divide(
    totals: list[list[float]], combine: Callable[[float, float], float], limit: float = inf
) -> tuple[float, tuple[int, ...]]:
    """Returns the least cost of a cut whose stages all take at most `limit` seconds, and its bounds.

    A dynamic program over stages and units: best[u] is the least cost of placing the first u units on the stages so
    far, and `combine(cost, time)` adds a stage of that time to the cost of the stages before it.
    """
    stages, units = len(totals), len(totals[0]) - 1
    best = [0.0] + [inf] * units
    choices = []
    for k, total in enumerate(totals):
        new, choice = [inf] * (units + 1), [0] * (units + 1)
        for end in range(k + 1, units - (stages - 1 - k) + 1):
            for start in range(end - 1, k - 1, -1) if k else (0,):
                time = total[end] - total[start]
                if time > limit * (1 + 1e-12) or combine(0.0, time) >= new[end]:
                    break  # an earlier start only makes the stage longer
                cost = combine(best[start], time)
                if cost < new[end]:
                    new[end], choice[end] = cost, start
        best = new
        choices.append(choice)
    bounds, end = [], units
    for choice in reversed(choices[1:]):
        end = choice[end]
        bounds.append(end)
    return best[units], tuple(reversed(bounds))


def cut_pieces(plan: Plan, profile: Profile, bounds: tuple[int, ...]) -> tuple[Piece, ...]:
    """Returns the pieces of all stages: one per stage, or several if the order is eager."""
    count = len(profile.units)
    ends = (0, *bounds, count)
    if any(a >= b for a, b in pairwise(ends)):
        raise InputError(f"cut bounds {list(bounds)} must rise strictly between 0 and the {count} units")
    pieces = []
    for stage, (start, end) in enumerate(pairwise(ends)):
        runs = _runs(plan, profile, stage, range(start, end))
        if plan.keep.places is not None and len(plan.keep.places) != len(runs):
            raise InputError(
                f"keep.places has {len(plan.keep.places)} entries, and stage {stage} has {len(runs)} pieces; give one"
                " for each"
            )
        for index, units in enumerate(runs):
            pieces.append(Piece(stage=stage, units=units, opens_stage=index == 0))
    return tuple(pieces)


def _runs(plan: Plan, profile: Profile, stage: int, units: range) -> list[range]:
    """Divides a stage's units into runs: at checkpoints and, if the order is eager, where buckets are full.

    The units of a run are recomputed, reduced and updated together.
    """
    by_unit = plan.cut.kind == "layout" or plan.keep.kind in ("host", "split") or plan.zero_of(stage) == 3
    if plan.order.is_eager and by_unit:
        return [range(u, u + 1) for u in units]
    checkpoints, bucket_bytes = {*(plan.order.checkpoints or ())}, plan.bucket_bytes if plan.order.is_eager else inf
    runs, end, size_bytes = [], units.stop, 0
    for unit in reversed(units):  # the order in which gradients become final
        size_bytes += profile.units[unit].gradient_bytes
        if size_bytes >= bucket_bytes or unit in checkpoints or unit == units.start:
            runs.append(range(unit, end))
            end, size_bytes = unit, 0
    return runs[::-1]


def piece_inputs(profile: Profile, pieces: tuple[Piece, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns, for each piece, the pieces whose outputs it reads."""
    piece_of = {unit: index for index, piece in enumerate(pieces) for unit in piece.units}
    inputs: list[set[int]] = [set() for _ in pieces]
    for source, target, _ in profile.links:
        if piece_of[source] != piece_of[target]:
            inputs[piece_of[target]].add(piece_of[source])
    return tuple(tuple(sorted(sources)) for sources in inputs)
