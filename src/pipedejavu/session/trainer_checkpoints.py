"""The folder of checkpoints that a Trainer writes: one process, or a shard file per rank."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipedejavu.facts.printable import tell
from pipedejavu.plan import Plan
from pipedejavu.run.saved_facts import check_finite
from pipedejavu.session.trainer_ranks import TrainerRanks
from pipedejavu.store import Checkpoint, CheckpointDir, Saver, Tensors


class TrainerCheckpoints:
    """Writes checkpoints in the background, and finds the newest."""

    def __init__(self, ranks: TrainerRanks | None):
        self.ranks = ranks
        self._saver: Saver | None = None

    def save(self, folder: Path, step: int, tensors: Tensors, about: Callable[[], Mapping[str, Any]]) -> None:
        """Starts writing this process's tensors; all ranks call it."""
        if self._saver is None or self._saver.checkpoint_dir.path != folder:
            self.wait()
            ranks = self.ranks
            store = (ranks.store("saver"), ranks.size) if ranks else None
            self._saver = Saver(CheckpointDir(folder), rank=ranks.rank if ranks else 0, store=store, tell=tell)
        self._saver.save(step, tensors, about)

    def wait(self) -> None:
        """Waits until all saved checkpoints are on disk, those of other ranks too."""
        if self._saver is not None:
            self._saver.wait()
        if self.ranks is not None:
            self.ranks.agree("wait")

    def newest(self, folder: Path, *, allow_restart: bool) -> Checkpoint | None:
        """Returns the newest complete checkpoint of a folder, the same on all ranks; None if it never had one."""
        self.wait()
        checkpoint_dir, checkpoint = CheckpointDir(folder), None
        if self.ranks is None or self.ranks.rank == 0:  # sets damaged ones aside
            checkpoint = checkpoint_dir.newest(tell, allow_restart=allow_restart)
        if self.ranks is not None:
            step = self.ranks.broadcast_text("" if checkpoint is None else str(checkpoint.step))
            checkpoint = Checkpoint(checkpoint_dir.folder(int(step))) if step else None
        if checkpoint is not None:
            check_finite(checkpoint, checkpoint_dir)
        return checkpoint


def describe_checkpoint(plan: Plan, samples: int, losses: Sequence[float], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the manifest of a checkpoint says; `losses` are those since the last one."""
    loss = sum(losses) / len(losses) if losses else None
    return {"samples": samples, "loss": loss, "plan": json.loads(plan.to_json()), "facts": facts}
