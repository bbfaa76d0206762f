"""Training runs: options, the run folder, workers as processes, and what they leave."""

from pipedejavu.train.folder import RunFolder
from pipedejavu.train.launch import Trained, audit_run, plan_run, train
from pipedejavu.train.options import TrainOptions
from pipedejavu.train.trainer import Trainer

__all__ = ["RunFolder", "TrainOptions", "Trained", "Trainer", "audit_run", "plan_run", "train"]
