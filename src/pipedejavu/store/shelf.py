"""The folder of a run's checkpoints: step-40/ with its parts and its manifest, and LATEST, which names the newest.

A checkpoint is written as step-40.tmp/. When all of it is on the disk it gets its name, then the folder is synced, then
LATEST moves; so a name without .tmp stands for a whole checkpoint, whenever the power goes. An older one is deleted
only after the new one was read again and found to be what was meant.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from pipedejavu.facts import remove, replace_file
from pipedejavu.facts.file import sync_folder
from pipedejavu.store.checkpoint import MANIFEST, Checkpoint
from pipedejavu.store.manifest import CheckpointError, Entry, Manifest, Part

LATEST = "LATEST"
KEPT = 2
"""Newest checkpoints that stay; the best one, by its loss, stays too."""

_WHOLE = re.compile(r"step-(0|[1-9][0-9]{0,17})")


class Shelf:
    """The checkpoints of one run."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint with a whole name, in order."""
        if not self.path.is_dir():
            return []
        found = (_WHOLE.fullmatch(path.name) for path in self.path.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def folder(self, step: int) -> Path:
        """Returns where the checkpoint of a step lies."""
        return self.path / f"step-{step}"

    def draft(self, step: int) -> Path:
        """Returns the folder in which the parts of a checkpoint are written, and makes it."""
        path = self.path / f"step-{step}.tmp"
        if path.is_symlink():  # none of ours; what it names is not to be written to
            remove(path)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def commit(self, step: int, manifest: Manifest) -> Path:
        """Gives a draft whose parts are on the disk its manifest and its name, and lets LATEST name it."""
        draft, folder = self.draft(step), self.folder(step)
        replace_file(draft / MANIFEST, manifest.sealed())
        draft.rename(folder)
        sync_folder(self.path)
        replace_file(self.path / LATEST, f"{folder.name}\n".encode())
        return folder

    def discard(self, step: int) -> None:
        """Removes a draft."""
        remove(self.path / f"step-{step}.tmp")

    def collect(self) -> None:
        """Removes what was never finished; nobody may be writing."""
        for path in self.path.glob("*.tmp"):
            remove(path)

    def newest(self, tell: Callable[[str], None], before: int | None = None) -> Checkpoint | None:
        """Returns the newest checkpoint that is what was written, of a step before one if that is given, or None.

        One that is not is named to `tell` with the reason, and set aside as step-40.bad.
        """
        for step in reversed([step for step in self.steps() if before is None or step < before]):
            folder = self.folder(step)
            try:
                found = Checkpoint(folder)
                found.verify()
            except CheckpointError as error:
                tell(f"checkpoint {folder.name} cannot be used and {_set_aside(folder)}: {error}")
                continue
            return found
        return None

    def prune(self) -> None:
        """Verifies the newest checkpoint, then deletes those that are neither among the newest nor the best.

        Raises CheckpointError, and deletes nothing, where the newest is not what was meant.
        """
        steps = self.steps()
        if not steps:
            return
        Checkpoint(self.folder(steps[-1])).verify()
        losses = {step: loss for step in steps if (loss := self._loss(step)) is not None}
        best = min(losses, key=lambda step: losses[step]) if losses else None
        for step in steps[:-KEPT]:
            if step != best:
                self._remove(step)
        for path in self.path.glob("step-*.bad"):
            remove(path)

    def forget(self, step: int) -> None:
        """Removes the checkpoints behind a step, which a run that goes on from there makes again."""
        for later in self.steps():
            if later > step:
                self._remove(later)

    def _remove(self, step: int) -> None:
        # The name goes first, so that no half of it looks whole.
        remove(self.folder(step).rename(self.path / f"step-{step}.tmp"))

    def _loss(self, step: int) -> float | None:
        try:
            return Checkpoint(self.folder(step)).manifest.loss
        except CheckpointError:
            return None


def merged(reports: Mapping[str, tuple[Part, Mapping[str, Entry]]]) -> tuple[dict[str, Part], dict[str, Entry]]:
    """Returns the parts and the tensors of a manifest from what was written to each part."""
    parts = {name: part for name, (part, _) in reports.items()}
    return parts, {name: entry for _, entries in reports.values() for name, entry in sorted(entries.items())}


def part_name(number: int) -> str:
    """Returns the name of a checkpoint's n-th file."""
    return f"part-{number:05}.safetensors"


def _set_aside(folder: Path) -> str:
    """Renames a checkpoint that cannot be used; returns what became of it."""
    aside = folder.with_name(f"{folder.name}.bad")
    try:
        remove(aside)
        folder.rename(aside)
    except OSError as error:
        return f"stays where it is ({error.strerror})"
    return f"is set aside as {aside.name}"
