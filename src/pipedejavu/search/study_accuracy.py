"""Accuracy that stale pipelines lost in the study, as figures that were measured once and come with the package.

`reproduce accuracy` measures them; study_accuracy.toml has the date, the command and the figures.
"""

import tomllib
from functools import cache
from importlib.resources import files
from math import inf

from pipedejavu.facts import Record
from pipedejavu.plan import Plan


class LostAccuracy(Record):
    """Points of test accuracy that a stale pipeline lost against exact training with as many updates."""

    model: str
    version: str
    correction: str = "none"
    has_rates: bool = False
    """Whether the learning rates of stages rise with their delay."""
    staleness: int
    """Updates by which gradients were late at most."""
    points: float
    """The mean over seeds."""
    interval: float
    """Half of the 95 % interval of the mean."""

    def __str__(self) -> str:
        lost = f"lost {self.points:.1f}" if self.points >= 0 else f"gained {-self.points:.1f}"
        return f"{self.model} {lost} ± {self.interval:.1f} points"


class AccuracyStudy(Record):
    """The figures of one run of the study."""

    date: str
    command: str
    figures: tuple[LostAccuracy, ...]

    def of(self, plan: Plan) -> tuple[LostAccuracy, ...]:
        """Returns the figures of a stale plan's kind, all of one staleness; empty if it was not measured.

        The staleness is the least that was measured and is no smaller than the plan's, or else the largest.
        """
        version = plan.version
        form = (version.kind, version.correction, version.rate_updates > 0)
        alike = [each for each in self.figures if (each.version, each.correction, each.has_rates) == form]
        known = sorted({each.staleness for each in alike})
        if not known:
            return ()
        nearest = next((number for number in known if number >= staleness_of(plan)), known[-1])
        return tuple(each for each in alike if each.staleness == nearest)

    def lost(self, plan: Plan) -> float:
        """Returns the points that the study's first model lost; infinity if that was not measured."""
        return next((each.points for each in self.of(plan) if each.model == self.figures[0].model), inf)


@cache
def accuracy_study() -> AccuracyStudy:
    """Returns the figures that come with the package."""
    text = files("pipedejavu.search").joinpath("study_accuracy.toml").read_text(encoding="utf-8")
    return AccuracyStudy.model_validate(tomllib.loads(text), strict=False)


def staleness_of(plan: Plan) -> int:
    """Returns the updates by which gradients of a pipeline that never drains are late at most; 0 for other plans."""
    if not plan.is_flush_free:
        return 0
    last = (plan.num_stages or 1) - 1
    lags = {"stash": -(-last // plan.feed.microbatches), "vertical": last, "double-buffer": min(last, 1)}
    return lags[plan.version.kind]
