"""Sums over the units of stages: times, bytes of state and bytes of activations, for arrays of stages at once."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipedejavu.search.candidate_plan import Array, PlanningProblem

Positions = NDArray[np.intp]
Index = Positions | int


class TimeSums(NamedTuple):
    """Seconds per microbatch, or per update."""

    forward: Array
    backward: Array
    recompute: Array
    update: Array
    """Update of the state on the device."""
    host_update: Array
    """Update of the state in host memory."""
    model_host_update: float
    """Update of the whole model on the host's CPU."""


class StateSums(NamedTuple):
    """Bytes of state; also used for prefix sums over units."""

    weights: Array
    gradients: Array
    optimizer: Array

    def between(self, start: Index, end: Index) -> "StateSums":
        """Returns the sums over the units from `start` to `end`, if these are prefix sums."""
        return StateSums(*(np.asarray(totals[end] - totals[start]) for totals in self))


class ModelStateBytes(NamedTuple):
    """Bytes of state of the whole model."""

    weights: float
    gradients: float
    optimizer: float


class ActivationSums(NamedTuple):
    """Bytes of activations per microbatch."""

    saved: Array
    """Saved for the backward if nothing is recomputed."""
    checkpoints: Array
    """Saved for the backward if some units are recomputed."""
    inputs: Array
    """Received from the stage before."""
    outputs: Array
    """Sent to the next stage."""


class LargestUnit(NamedTuple):
    """The largest bytes of any one unit of a stage."""

    saved: Array
    weights: Array
    checkpoint: Array


class StageSums(NamedTuple):
    """Sums over the units of each stage."""

    num_units: Array
    time: TimeSums
    state: StateSums
    hosted: StateSums
    """The part of the state in host memory."""
    activations: ActivationSums
    largest: LargestUnit
    model: ModelStateBytes


def cut_bytes(problem: PlanningProblem) -> Array:
    """Returns the bytes per sample that cross each boundary between units; each unit's output counts once."""
    profile = problem.profile
    crossing: list[dict[int, float]] = [{} for _ in range(len(profile.units) + 1)]
    for source, target, size in profile.links:
        for outputs in crossing[source + 1 : target + 1]:
            outputs[source] = max(size, outputs.get(source, 0.0))
    return np.array([sum(outputs.values()) for outputs in crossing], dtype=float)


def prefix_sums(values: "list[float] | list[int] | Array") -> Array:
    """Returns the sums of the first 0, 1, 2, … values."""
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=float))])


def range_maxima(values: "list[float] | list[int]") -> Array:
    """Returns a matrix with the largest value from `start` to `end`."""
    count = len(values)
    maxima = np.zeros((count + 1, count + 1))
    for start in range(count):
        maxima[start, start + 1 :] = np.maximum.accumulate(np.asarray(values[start:], dtype=float))
    return maxima
