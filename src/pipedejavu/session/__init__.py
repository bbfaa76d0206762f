"""Training from a user's own loop: the Trainer, and checkpoints for any model and optimizer."""

from pipedejavu.session.loop_checkpoints import Checkpoints
from pipedejavu.session.trainer import Trainer

__all__ = [
    "Checkpoints",
    "Trainer",
]
