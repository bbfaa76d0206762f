"""The state of a running program between rounds, and training from the user's own loop: Trainer and Checkpoints."""

from pipedejavu.session.callback import Callback
from pipedejavu.session.fit_history import EpochRecord, FitHistory
from pipedejavu.session.loop_checkpoints import Checkpoints
from pipedejavu.session.trainer import Trainer

__all__ = [
    "Callback",
    "Checkpoints",
    "EpochRecord",
    "FitHistory",
    "Trainer",
]
