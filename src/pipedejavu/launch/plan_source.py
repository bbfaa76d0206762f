"""Where the plan of a run comes from when `train` starts: one decision, made from facts alone."""

from dataclasses import dataclass
from enum import Enum


class PlanSource(Enum):
    """A source of the plan that a run starts or goes on with."""

    SWITCH = "the plan that the run was switching to when it ran out of memory"
    RUN = "the plan that the run has had so far"
    FIT = "a plan with the same batch for another number of processes"
    SEARCH = "the planner"
    REQUEST = "the plan that the user names"


@dataclass(frozen=True, kw_only=True)
class StartFacts:
    """What decides where the plan comes from."""

    num_processes: int | None = None
    """Processes that torchrun started; None without torchrun, when the plan decides how many to start."""
    known_workers: int | None = None
    """Workers of the plan that the run has had so far; None for a new run."""
    is_sync: bool = True
    """Whether that plan is synchronous, so that another number of workers can go on."""
    switch_workers: int | None = None
    """Workers of the plan that the run was switching to, if it was and the user lets it; else None."""
    has_request: bool = False
    """Whether the user asked for anything that concerns the plan."""
    is_auto: bool = True
    """Whether the user leaves the plan to us (`--plan auto`)."""
    has_workers: bool = False
    """Whether the user gave the number of workers."""


def choose_source(facts: StartFacts) -> PlanSource:
    """Returns where the plan of a run comes from.

    A resumed run keeps its plan unless the user asks for another one, or torchrun started another number of processes.
    The planner is asked only if it may choose the number of workers.
    """
    is_launched, is_known = facts.num_processes is not None, facts.known_workers is not None
    fits = is_known and facts.num_processes in (None, facts.known_workers)
    if is_known and is_launched and facts.switch_workers == facts.num_processes:
        return PlanSource.SWITCH
    if fits and (not facts.has_request or (is_launched and facts.is_auto)):
        return PlanSource.RUN
    if is_known and is_launched and not fits and facts.is_sync:
        return PlanSource.FIT
    if facts.is_auto and not is_launched and not facts.has_workers:
        return PlanSource.SEARCH
    return PlanSource.REQUEST
