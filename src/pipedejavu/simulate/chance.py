"""The distribution of a program's time if the times of its actions vary: its mean and its bounds.

A profile's times are medians, and a timeline shows a round in which every action takes its median. Real times vary, and
a worker that waits for several others waits for the slowest: on average a round takes longer than the medians say, and
more so the more workers wait for each other. So the round is simulated many times. Each draw scales every action by its
measured spread, and all actions on a kind of device together by the machine's drift and by the error of past forecasts.
"""

import math
import random
from collections.abc import Iterable, Mapping
from statistics import NormalDist, fmean, quantiles
from typing import NamedTuple

from pipedejavu.analysis import Graph
from pipedejavu.simulate.action_cost import ActionCosts
from pipedejavu.simulate.clock import run_clock

DRAWS, MOST_OPERATIONS = 40, 100_000
"""Most draws, and most operations in all draws: a long program gets fewer draws, but averages over more actions."""
QUARTILE = 0.6745
"""Half of a normal distribution lies within this many standard deviations of its mean."""
NORMAL_90 = 1.645
"""90 % of a normal distribution lies within this many standard deviations of its mean."""
MOST_SIGMA = 0.5
"""Upper limit of a standard deviation: what disturbed a measurement need not disturb the run."""
OFF = {"cpu": 0.2, "gpu": 0.08}
"""Standard deviation of whole runs from their forecasts, by type of device, over 84 and 66 plans that were run. It
covers effects that unit times do not show, and machines that are slower or faster minutes later."""
_FEWEST = 4
"""Least draws for an average."""


class Chance(NamedTuple):
    """The time of a program: its mean, or for estimated times its median, and the bounds of a 90 % interval."""

    mean_s: float
    low_s: float
    high_s: float

    @property
    def varies(self) -> bool:
        """Whether the spread of times, or the error of estimates, is known."""
        return self.high_s > self.low_s


def chance_of(graph: Graph, makespan_s: float) -> Chance:
    """Returns the distribution of a program's time from independent draws; deterministic for a given program."""
    program, costs = graph.program, ActionCosts(graph.program)
    if program.profile.error:
        used = {program.machine.device(name).kind for name in program.devices}
        return estimated_chance(program.profile.error, used, makespan_s)
    works, spreads = costs.of(graph), costs.spreads(graph)
    draws = min(DRAWS, MOST_OPERATIONS // max(1, len(works)))
    if draws < _FEWEST or not any(spreads):
        return Chance(makespan_s, makespan_s, makespan_s)
    devices = [program.machine.device(name) for name in program.devices]
    drifts = {d.kind: min(MOST_SIGMA, math.hypot(program.profile.drift.get(d.kind, 0.0), OFF[d.type])) for d in devices}
    kinds = [devices[worker].kind for worker, _ in graph.members]
    sigmas = [min(MOST_SIGMA, spread / QUARTILE) for spread in spreads]
    source, times = random.Random(0), []
    for draw in range(draws):
        # The common factor takes evenly spaced quantiles, as few random draws would not average it out. Its mean is 1,
        # so that an error in either direction does not lengthen the forecast.
        rank = NormalDist().inv_cdf((draw + 0.5) / draws)
        common = {kind: sigma * rank - sigma**2 / 2 for kind, sigma in drifts.items()}
        drawn = [
            work._replace(time_s=work.time_s * math.exp(common[kind] + sigma * source.gauss())) if sigma else work
            for work, sigma, kind in zip(works, sigmas, kinds, strict=True)
        ]
        times.append(max(run_clock(graph, drawn)[1], default=0.0))
    bounds = quantiles(times, n=20, method="inclusive")
    return Chance(fmean(times), bounds[0], bounds[-1])


def estimated_chance(error: Mapping[str, float], kinds: Iterable[str], time_s: float) -> Chance:
    """Returns the distribution of a time on some kinds of devices that follows from estimates with known errors.

    Estimates err alike on all devices of a kind, and a program on several kinds errs as the one with the largest error.
    """
    factor = math.exp(NORMAL_90 * max((error.get(kind, 0.0) for kind in kinds), default=0.0))
    return Chance(time_s, time_s / factor, time_s * factor)
