"""Training runs: plans them, starts their workers or is one of them, and gathers the results."""

from pipedejavu.launch.elastic import fit_plan
from pipedejavu.launch.init_trial import ChosenInit, choose_init
from pipedejavu.launch.plan_source import PlanSource, StartFacts, choose_source
from pipedejavu.launch.planned_run import PlannedRun, plan_run
from pipedejavu.launch.resume import Resumed, is_same_plan, reopen
from pipedejavu.launch.run_session import train, train_rank
from pipedejavu.launch.trained import TrainedRun, audit_run, judge_run
from pipedejavu.launch.trial import find_fastest
from pipedejavu.session.rank_group import RankGroup

__all__ = [
    "ChosenInit",
    "PlanSource",
    "PlannedRun",
    "RankGroup",
    "Resumed",
    "StartFacts",
    "TrainedRun",
    "audit_run",
    "choose_init",
    "choose_source",
    "find_fastest",
    "fit_plan",
    "is_same_plan",
    "judge_run",
    "plan_run",
    "reopen",
    "train",
    "train_rank",
]
