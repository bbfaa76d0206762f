"""How long a program takes where the times of its actions vary: on average, and within which bounds.

A profile's times are medians, and a timeline shows a round in which every action takes its median. Real ones vary, and
whoever waits for several waits for the slowest of them: on average a round takes longer than its medians say, the more
so the more workers wait for each other. Here it is run on paper a number of times, each action as much slower or
faster as chance has it, by the spread with which it was measured; and all of a kind of device together, by how the
machine drifts and by how far forecasts were off that rest on such measurements.
"""

import math
import random
from statistics import NormalDist, fmean, quantiles
from typing import NamedTuple

from pipedejavu.analysis import Graph
from pipedejavu.simulate.action_cost import ActionCosts
from pipedejavu.simulate.clock import run_clock

DRAWS, MOST_OPERATIONS = 40, 100_000
"""Rounds on paper, and operations of all of them together: a long program has fewer, but more to average over."""
QUARTILE = 0.6745
"""Standard deviations on each side that hold the middle half of a normal distribution."""
MOST_SIGMA = 0.5
"""What a machine that was busy while it was measured may vary by: its disturbances are not those of the run."""
OFF = {"cpu": 0.2, "gpu": 0.08}
"""Standard deviation of whole runs from their forecasts, by type of device, over 84 and 66 plans that were run: what
times of units do not tell, and machines that are slower or faster minutes later."""
_FEWEST = 4
"""Draws, below which an average says little."""


class Chance(NamedTuple):
    """What a program takes: on average, and in nine of ten cases between two bounds."""

    mean_s: float
    low_s: float
    high_s: float

    @property
    def varies(self) -> bool:
        """Whether anything is known of how times vary."""
        return self.high_s > self.low_s


def chance_of(graph: Graph, makespan_s: float) -> Chance:
    """Draws every action's time anew, independent of the others; the same for the same program."""
    program, costs = graph.program, ActionCosts(graph.program)
    works, spreads = costs.of(graph), costs.spreads(graph)
    draws = min(DRAWS, MOST_OPERATIONS // max(1, len(works)))
    if draws < _FEWEST or not any(spreads):
        return Chance(makespan_s, makespan_s, makespan_s)
    devices = [program.machine.device(name) for name in program.devices]
    drifts = {d.kind: min(MOST_SIGMA, math.hypot(program.profile.drift.get(d.kind, 0.0), OFF[d.type])) for d in devices}
    own = [devices[worker].kind for worker, _ in graph.members]
    sigmas = [min(MOST_SIGMA, spread / QUARTILE) for spread in spreads]
    source, found = random.Random(0), []
    for draw in range(draws):
        # One of evenly likely values, as few draws would not average it out, and 1 on average: a forecast that may be
        # off either way is no longer for that.
        rank = NormalDist().inv_cdf((draw + 0.5) / draws)
        common = {kind: sigma * rank - sigma**2 / 2 for kind, sigma in drifts.items()}
        drawn = [
            work._replace(time_s=work.time_s * math.exp(common[kind] + sigma * source.gauss())) if sigma else work
            for work, sigma, kind in zip(works, sigmas, own, strict=True)
        ]
        found.append(max(run_clock(graph, drawn)[1], default=0.0))
    bounds = quantiles(found, n=20, method="inclusive")
    return Chance(fmean(found), bounds[0], bounds[-1])
