"""A rule about plans: a combination of axes that is refused, with the reason and the remedy."""

from collections.abc import Callable
from typing import NamedTuple

from pipedejavu.facts import Profile
from pipedejavu.plan.plan import Plan


class Rule(NamedTuple):
    """A combination that is refused; `breaks` tells whether a plan has it."""

    breaks: Callable[[Plan, Profile], bool]
    reason: str
    remedy: str


PIPELINES = ("gpipe", "1f1b", "1f1b-async", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "ready-first", "written")
"""Orders of pipelines."""


def num_replicas(plan: Plan) -> int:
    """Returns the replicas of the whole model, those of CPUs included."""
    return plan.data_replicas + plan.place.cpu_replicas


def ties_cross_stages(plan: Plan, profile: Profile) -> bool:
    """Whether stages may share parameters."""
    return bool(profile.ties) and plan.num_stages != 1
