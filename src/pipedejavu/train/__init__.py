"""Training runs: options, the run folder, workers as processes, and what they leave."""

from pipedejavu.train.failure import WorkerError
from pipedejavu.train.folder import RunFolder
from pipedejavu.train.launch import Planned, Trained, audit_run, plan_run, train, train_rank
from pipedejavu.train.occupancy import Occupancy, occupancy_of
from pipedejavu.train.options import TrainOptions
from pipedejavu.train.recording import HybridRun, read_run
from pipedejavu.train.review import Review, review
from pipedejavu.train.site import num_gpus
from pipedejavu.train.team import Team
from pipedejavu.train.trainer import Trainer

__all__ = [
    "HybridRun",
    "Occupancy",
    "Planned",
    "Review",
    "RunFolder",
    "Team",
    "TrainOptions",
    "Trained",
    "Trainer",
    "WorkerError",
    "audit_run",
    "num_gpus",
    "occupancy_of",
    "plan_run",
    "read_run",
    "review",
    "train",
    "train_rank",
]
