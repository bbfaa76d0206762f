"""Training runs: options, the run folder, workers as processes, and what they leave."""

from pipedejavu.train.candidate import Chosen, choose_candidate
from pipedejavu.train.elastic import fit_plan
from pipedejavu.train.failure import WorkerError
from pipedejavu.train.folder import RunFolder, Start
from pipedejavu.train.halt import StoppedError
from pipedejavu.train.history import Event, History, Step, find_runs
from pipedejavu.train.hold import hold
from pipedejavu.train.launch import Planned, plan_run, train, train_rank
from pipedejavu.train.logbook import check_logbooks
from pipedejavu.train.loop import Checkpoints
from pipedejavu.train.occupancy import Occupancy, occupancy_of
from pipedejavu.train.options import TrainOptions
from pipedejavu.train.recording import HybridRun, read_run
from pipedejavu.train.resume import Resumed, is_same_plan, reopen
from pipedejavu.train.review import Review, review
from pipedejavu.train.site import num_gpus
from pipedejavu.train.team import Team
from pipedejavu.train.trained import Trained, audit_run, judge_run
from pipedejavu.train.trainer import Trainer
from pipedejavu.train.trial import find_fastest

__all__ = [
    "Checkpoints",
    "Chosen",
    "Event",
    "History",
    "HybridRun",
    "Occupancy",
    "Planned",
    "Resumed",
    "Review",
    "RunFolder",
    "Start",
    "Step",
    "StoppedError",
    "Team",
    "TrainOptions",
    "Trained",
    "Trainer",
    "WorkerError",
    "audit_run",
    "check_logbooks",
    "choose_candidate",
    "find_fastest",
    "find_runs",
    "fit_plan",
    "hold",
    "is_same_plan",
    "judge_run",
    "num_gpus",
    "occupancy_of",
    "plan_run",
    "read_run",
    "reopen",
    "review",
    "train",
    "train_rank",
]
