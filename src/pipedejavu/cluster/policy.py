"""Policies: which jobs come first. Each is a pure function of the jobs and the time."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from pipedejavu.cluster.cluster_job import ClusterJob
from pipedejavu.cluster.max_min import Claim, max_min_shares


class JobView(NamedTuple):
    """What a policy sees of a job."""

    number: int
    job: ClusterJob
    left_steps: float
    attained_s: float
    """Seconds of GPUs (of a whole job of CPUs) that it has had."""
    received_s: Mapping[str, float]
    """Seconds that it has run, by kind."""
    rates: Mapping[str, float]
    """Updates per second by kind, with the share of cores and memory that its GPUs bring; usable kinds only."""


class RankedJob(NamedTuple):
    """A job, and the kinds of device that it should get, best first."""

    number: int
    kinds: tuple[str, ...]


Capacity = Mapping[str, int]
"""Thousandths of GPUs by kind."""
Rank = Callable[[Sequence[JobView], Capacity], list[RankedJob]]


class Policy(NamedTuple):
    """A rank of jobs, and whether running ones make room for those that come first."""

    title: str
    rank: Rank
    is_preemptive: bool
    moves: bool = False
    """Whether running jobs change to another kind of device as their shares of time ask."""


def _sorted_by(key: Callable[[JobView], float]) -> Rank:
    def rank(views: Sequence[JobView], _: Capacity) -> list[RankedJob]:
        ordered = sorted(views, key=lambda view: (key(view), view.job.arrival_s, view.number))
        return [RankedJob(view.number, fastest_first(view)) for view in ordered]

    return rank


def fastest_first(view: JobView) -> tuple[str, ...]:
    """Returns the kinds that a job can use, the fastest first."""
    return tuple(sorted(view.rates, key=lambda kind: (-view.rates[kind], kind)))


def left_s(view: JobView) -> float:
    """Returns the run time that a job has left on its fastest kind."""
    return view.left_steps / max(view.rates.values(), default=inf)


def rank_max_min(views: Sequence[JobView], capacity: Capacity) -> list[RankedJob]:
    """Ranks by heterogeneity-aware max-min fairness: shares of time by kind, and those furthest behind theirs first.

    Jobs with equal rates and sizes are one claim of the linear program. A job has the kinds whose share it is furthest
    behind first; kinds without a share come last.
    """
    groups: dict[tuple[object, ...], list[JobView]] = {}
    for view in views:
        groups.setdefault((view.job.gpu_milli, *sorted(view.rates.items())), []).append(view)
    claims = [Claim(v[0].rates, max(v[0].job.gpu_milli, 1), len(v)) for v in groups.values()]
    choices = []
    for shares, members in zip(max_min_shares(claims, capacity), groups.values(), strict=True):
        for view in members:
            had = sum(view.received_s.values())
            due = {
                kind: shares.get(kind, 0.0) / (view.received_s.get(kind, 0.0) / had + 1e-3 if had else 1e-3)
                for kind in view.rates
            }
            kinds = tuple(sorted(due, key=lambda kind, due=due: (-due[kind], kind)))  # type: ignore[misc]
            weight = sum(shares.values()) / (view.attained_s + 1.0)
            choices.append((-weight, view.job.arrival_s, view.number, kinds))
    return [RankedJob(number, kinds) for _, _, number, kinds in sorted(choices)]


POLICIES: dict[str, Policy] = {
    "fifo": Policy("first in, first out", _sorted_by(lambda view: view.job.arrival_s), is_preemptive=False),
    "srtf": Policy("shortest remaining time first", _sorted_by(left_s), is_preemptive=True),
    "las": Policy("least attained service first", _sorted_by(lambda view: view.attained_s), is_preemptive=True),
    "deadline": Policy(
        "earliest deadline first",
        _sorted_by(lambda view: inf if view.job.deadline_s is None else view.job.deadline_s),
        is_preemptive=True,
    ),
    "max-min": Policy("heterogeneity-aware max-min fairness", rank_max_min, is_preemptive=True, moves=True),
}
