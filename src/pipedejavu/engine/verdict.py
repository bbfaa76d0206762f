"""The verdict of an audit: whether a run differs from its replay by more than rounding.

How much rounding may be is measured, parameter by parameter: the same log is replayed in the run's own dtype, and the
distance between the two replays is the scale. It holds whatever the optimizer and the model make of rounding.
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
"""How many times the scale a difference may be; see docs/engine.md."""
MORE_REPLAYS = 3
"""Replays from nudged weights before a run fails, as one replay may round well by luck."""
MOST_BLUR = 0.1
BLURRED = "rounding alone may move weights {:.0%} as far as training did, so use --dtype float64 for a sharper audit"

Home = tuple[int, int]
"""A (piece, replica)."""


class Excess(NamedTuple):
    """A parameter that differs by more than rounding, and the copy of it that differs most."""

    name: str
    replica: int
    worker: int


@dataclass(frozen=True)
class Verdict:
    """What an audit found of each parameter, and whether that is rounding."""

    differences: dict[str, float]
    """The largest between the run and its float64 replay."""
    tolerances: dict[str, float]
    """The largest that rounding makes."""
    excess: Excess | None = None
    """Where the difference is furthest beyond the tolerance."""
    blur: float = 0.0
    """The tolerance of the median parameter, over how far training has moved it."""
    refusal: str = ""
    """Why the log is not what the plan promises; then nothing is compared."""

    @property
    def is_passed(self) -> bool:
        """Whether the run computed what its plan says."""
        return self.excess is None and not self.refusal

    @property
    def name(self) -> str:
        """The parameter that the verdict is told by."""
        return self.excess.name if self.excess else max(self.differences, key=self.differences.__getitem__, default="")

    def to_dict(self) -> dict[str, object]:
        """Returns what a summary has of it, as JSON can hold it."""
        largest = max(self.differences.values(), default=math.nan)
        return {
            "verdict": "passed" if self.is_passed else "failed",
            "sentence": str(self),
            "largest_difference": _plain(largest),
            "tolerance": _plain(self.tolerances.get(self.name, math.nan)),
            "differences": {name: _plain(found) for name, found in self.differences.items()},
            "tolerances": {name: _plain(found) for name, found in self.tolerances.items()},
            "blur": _plain(self.blur),
        }

    def __str__(self) -> str:
        if self.refusal:
            return f"audit failed: {self.refusal}"
        difference, tolerance = self.differences.get(self.name, 0.0), self.tolerances.get(self.name, 0.0)
        if self.excess is None:
            told = f"audit passed: largest difference {difference:.3g}, where {tolerance:.3g} is rounding"
            return told + (f"; {BLURRED.format(self.blur)}" if self.blur > MOST_BLUR else "")
        where = f"'{self.name}' of replica {self.excess.replica} on worker {self.excess.worker}"
        return f"audit failed: {where} differs by {difference:.3g} where {tolerance:.3g} is rounding"


def judge(program: Program, job: Job, batches: Batches, outcome: Outcome, uncut: UncutModel | None = None) -> Verdict:
    """Replays a run in float64 and in its own dtype, and judges by the distance; fails it for a log that is not right.

    The float64 replay is of the uncut model if it is given.

    Raises InputError for a run without versions (Hogwild), which has no replay.
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
        self.initial, self.exact = [runner.initial for runner in replay.runners], replay.run(outcome.logs)
        self.scales: dict[str, float] = {}
        """By parameter, the largest distance so far between replays."""

    def judge(self) -> Verdict:
        is_double = all(weight.dtype == torch.float64 for _, _, weight in _flat(self.outcome.weights))
        # In float64 only a nudge lets a second replay round otherwise than the first.
        for nudge in range(MORE_REPLAYS + 1):
            self._replay(nudge if nudge or is_double else None)
            verdict = self._compare()
            if verdict.is_passed:
                break
        return verdict

    def _replay(self, nudge: int | None) -> None:
        """Replays in the run's dtype and takes in how far that is from the float64 replay."""
        replay = Replay(self.program, self.job, self.batches, in_double=False, nudge=nudge)
        for home, name, weight in _flat(replay.run(self.outcome.logs)):
            distance = _distance(weight, self.exact[home][name])
            self.scales[name] = max(self.scales.get(name, 0.0), distance)

    def _compare(self) -> Verdict:
        counts, usual = self._counts(), median(self.scales.values()) if self.scales else 0.0
        differences: dict[str, float] = {}
        tolerances: dict[str, float] = {}
        worst, excess, blurs = 1.0, None, []
        for home, name, weight in _flat(self.outcome.weights):
            expected = self.exact[home][name]
            difference, largest = _distance(weight, expected), _distance(expected, torch.zeros_like(expected))
            floor = torch.finfo(weight.dtype).eps / 2 * counts[home[0]] * largest
            tolerance = FACTOR * max(self.scales[name], usual) + floor
            differences[name] = max(difference, differences.get(name, 0.0))
            tolerances[name] = max(tolerance, tolerances.get(name, 0.0))
            moved = _distance(expected, self.initial[home[0]][name])
            blurs.append(tolerance / moved if moved else 0.0)
            if difference > tolerance * worst:
                worst = difference / tolerance if tolerance else math.inf
                excess = Excess(name, home[1], self._worker(home))
        return Verdict(differences, tolerances, excess, median(blurs) if blurs else 0.0)

    def _counts(self) -> Counter[int]:
        """Returns the updates that each piece's weights have had; those of replicas on their own meet in all."""
        events = [event for log in self.outcome.logs for event in log.events if isinstance(event, Applied)]
        by_home = Counter((event.piece, event.replica) for event in events)
        found: Counter[int] = Counter()
        for (piece, _), count in by_home.items():
            found[piece] = found[piece] + count if self.program.plan.feed.kind == "own" else max(found[piece], count)
        return found

    def _worker(self, home: Home) -> int:
        return next(w for w in range(len(self.program.workers)) if home in pieces_of(self.program, w))


def _plain(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _flat(weights: Mapping[Home, Mapping[str, Tensor]]) -> Iterator[tuple[Home, str, Tensor]]:
    for home, tensors in weights.items():
        for name, weight in tensors.items():
            yield home, name, weight


def _distance(one: Tensor, other: Tensor) -> float:
    """Returns the largest difference of any element; infinite if one is not a number and the other is."""
    if not one.numel():
        return 0.0
    first, second = one.detach().double().cpu(), other.detach().double().cpu()
    is_same = (first == second) | (first.isnan() & second.isnan())
    return float((first - second).abs().masked_fill(is_same, 0.0).nan_to_num(nan=math.inf).max())
