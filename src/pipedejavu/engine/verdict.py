"""The verdict of an audit: whether a run differs from its replay by more than rounding.

The size of rounding errors is measured per parameter: the log is also replayed in the dtype of the run, and the
distance between the two replays is the scale. This covers how the model and the optimizer amplify rounding.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from pipedejavu.engine.audit import Replay
from pipedejavu.engine.handlers import pieces_of
from pipedejavu.engine.job import Applied, Batches, Job
from pipedejavu.engine.log_check import check_log, check_replayable
from pipedejavu.engine.threads import Outcome
from pipedejavu.engine.uncut_replay import UncutModel
from pipedejavu.facts import InputError
from pipedejavu.program import Program

FACTOR = 16
"""The largest accepted difference, in multiples of the scale; see docs/engine.md."""
LOW_FACTOR = 4
"""The same for precisions that round products or moments: there differences are root mean squares over a parameter."""
MORE_REPLAYS = 3
"""Further replays from nudged weights before a run fails, as one replay may round well by chance."""
MOST_BLUR = 0.1
BLURRED = "rounding alone may move weights {:.0%} as far as training did, so use --precision {} for a sharper audit"

PieceReplica = tuple[int, int]
"""A (piece, replica) pair."""


class Excess(NamedTuple):
    """A parameter that differs by more than rounding, and its copy that differs most."""

    name: str
    replica: int
    worker: int


@dataclass(frozen=True)
class Verdict:
    """The differences that an audit found, and whether they are rounding."""

    differences: dict[str, float]
    """By parameter, the largest difference between the run and its float64 replay."""
    tolerances: dict[str, float]
    """By parameter, the largest difference that rounding explains."""
    excess: Excess | None = None
    """The parameter that exceeds its tolerance by the largest factor, if any."""
    blur: float = 0.0
    """The median over parameters of the tolerance relative to the distance that training moved the parameter."""
    is_low: bool = False
    """Whether products or moments were rounded to fewer bits than float32; differences are then root mean squares."""
    refusal: str = ""
    """Why the log contradicts the plan; nothing is compared then."""

    @property
    def is_passed(self) -> bool:
        """Whether the run computed what its plan specifies."""
        return self.excess is None and not self.refusal

    @property
    def name(self) -> str:
        """The parameter that the verdict reports."""
        return self.excess.name if self.excess else max(self.differences, key=self.differences.__getitem__, default="")

    @property
    def origin(self) -> str:
        """Where the tolerance comes from, as a sentence; empty if nothing was compared."""
        if self.refusal:
            return ""
        factor = LOW_FACTOR if self.is_low else FACTOR
        return (
            f"The tolerance of each parameter is {factor} times the distance between a replay of the run in float64 and"
            " one in its own precision."
        )

    def to_dict(self) -> dict[str, object]:
        """Returns the verdict as JSON values, for a summary."""
        largest = max(self.differences.values(), default=math.nan)
        return {
            "verdict": "passed" if self.is_passed else "failed",
            "sentence": str(self),
            "largest_difference": _plain(largest),
            "tolerance": _plain(self.tolerances.get(self.name, math.nan)),
            "differences": {name: _plain(size) for name, size in self.differences.items()},
            "tolerances": {name: _plain(size) for name, size in self.tolerances.items()},
            "blur": _plain(self.blur),
        }

    def __str__(self) -> str:
        if self.refusal:
            return f"audit failed: {self.refusal}"
        difference, tolerance = self.differences.get(self.name, 0.0), self.tolerances.get(self.name, 0.0)
        if self.excess is None:
            what = "RMS difference" if self.is_low else "difference"
            told = f"audit passed: largest {what} {difference:.3g}, where {tolerance:.3g} is rounding"
            sharper = BLURRED.format(self.blur, "fp32" if self.is_low else "fp64")
            return told + (f"; {sharper}" if self.blur > MOST_BLUR else "")
        where = f"'{self.name}' of replica {self.excess.replica} on worker {self.excess.worker}"
        return f"audit failed: {where} differs by {difference:.3g} where {tolerance:.3g} is rounding"


def judge(program: Program, job: Job, batches: Batches, outcome: Outcome, uncut: UncutModel | None = None) -> Verdict:
    """Judges a run by the distance between its replays in float64 and in its own dtype.

    The run fails if its log contradicts the plan. The float64 replay runs the uncut model if it is given. Raises
    InputError for a run without versions (Hogwild), which has no replay.
    """
    check_replayable(program.plan)
    try:
        check_log(program, batches, outcome.logs)
        return _Judge(program, job, batches, outcome, uncut).judge()
    except InputError as error:
        return Verdict({}, {}, refusal=str(error))


class _Judge:
    """One run beside its float64 replay."""

    def __init__(self, program: Program, job: Job, batches: Batches, outcome: Outcome, uncut: UncutModel | None):
        self.program, self.job, self.batches, self.outcome = program, job, batches, outcome
        replay = Replay(program, job, batches, uncut)
        self.initial, self.exact = replay.initial, replay.run(outcome.logs)
        self.is_low = program.plan.precision.rounds
        self.size, self.factor = (_mean_distance, LOW_FACTOR) if self.is_low else (_distance, FACTOR)
        self.scales: dict[str, float] = {}
        """By parameter, the largest distance so far between replays."""

    def judge(self) -> Verdict:
        is_double = all(weight.dtype == torch.float64 for _, _, weight in _flat(self.outcome.weights))
        # In float64 a second replay rounds differently only from nudged weights.
        for nudge in range(MORE_REPLAYS + 1):
            self._replay(nudge if nudge or is_double else None)
            verdict = self._compare()
            if verdict.is_passed:
                break
        return verdict

    def _replay(self, nudge: int | None) -> None:
        """Replays in the dtype of the run and records the distance from the float64 replay."""
        replay = Replay(self.program, self.job, self.batches, in_double=False, nudge=nudge)
        for key, name, weight in _flat(replay.run(self.outcome.logs)):
            distance = self.size(weight, self.exact[key][name])
            self.scales[name] = max(self.scales.get(name, 0.0), distance)

    def _compare(self) -> Verdict:
        trained = {name for weights in self.initial for name in weights}  # frozen ones have no distance
        scales = [scale for name, scale in self.scales.items() if name in trained]
        counts, usual = self._counts(), median(scales) if scales else 0.0
        differences: dict[str, float] = {}
        tolerances: dict[str, float] = {}
        worst, excess, blurs = 1.0, None, []
        for key, name, weight in _flat(self.outcome.weights):
            expected = self.exact[key][name]
            difference, largest = self.size(weight, expected), self.size(expected, torch.zeros_like(expected))
            least = torch.finfo(weight.dtype).eps / 2 * counts[key[0]] * largest
            tolerance = self.factor * max(self.scales[name], usual) + least
            differences[name] = max(difference, differences.get(name, 0.0))
            tolerances[name] = max(tolerance, tolerances.get(name, 0.0))
            if name in trained:
                moved = self.size(expected, self.initial[key[0]][name])
                blurs.append(tolerance / moved if moved else 0.0)
            if difference > tolerance * worst:
                worst = difference / tolerance if tolerance else math.inf
                excess = Excess(name, key[1], self._worker(key))
        return Verdict(differences, tolerances, excess, median(blurs) if blurs else 0.0, self.is_low)

    def _counts(self) -> Counter[int]:
        """Returns the number of updates per piece, summed over replicas if they update separately."""
        events = [event for log in self.outcome.logs for event in log.events if isinstance(event, Applied)]
        by_replica = Counter((event.piece, event.replica) for event in events)
        counts: Counter[int] = Counter()
        for (piece, _), count in by_replica.items():
            counts[piece] = counts[piece] + count if self.program.plan.feed.is_own else max(counts[piece], count)
        return counts

    def _worker(self, key: PieceReplica) -> int:
        return next(w for w in range(len(self.program.workers)) if key in pieces_of(self.program, w))


def _plain(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _flat(weights: Mapping[PieceReplica, Mapping[str, Tensor]]) -> Iterator[tuple[PieceReplica, str, Tensor]]:
    for key, tensors in weights.items():
        for name, weight in tensors.items():
            yield key, name, weight


def _distance(one: Tensor, other: Tensor) -> float:
    """Returns the largest absolute difference of any element; infinite if exactly one of the two is NaN."""
    return float(_differences(one, other).max()) if one.numel() else 0.0


def _mean_distance(one: Tensor, other: Tensor) -> float:
    """Returns the root mean square of the differences of all elements; infinite if exactly one of the two is NaN."""
    return float(_differences(one, other).square().mean().sqrt()) if one.numel() else 0.0


def _differences(one: Tensor, other: Tensor) -> Tensor:
    first, second = one.detach().double().cpu(), other.detach().double().cpu()
    is_same = (first == second) | (first.isnan() & second.isnan())
    return (first - second).abs().masked_fill(is_same, 0.0).nan_to_num(nan=math.inf)
