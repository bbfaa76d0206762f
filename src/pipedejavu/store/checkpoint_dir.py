"""The folder of a run's checkpoints: step-40/ with its parts and its manifest, and LATEST, which names the newest.

A checkpoint is written as step-40.tmp/. When all of it is on the disk it gets its name, then the folder is synced, then
LATEST moves; so a name without .tmp stands for a whole checkpoint, whenever the power goes. An older one is deleted
only after the new one was read again and found to be what was meant. One that is proved to be damaged is renamed to
step-40.bad and never deleted; one that only cannot be read stays as it is, and stops its reader.
"""

import os
from collections.abc import Callable, Mapping
from itertools import chain, count
from pathlib import Path

from pipedejavu.facts import remove, replace_file
from pipedejavu.facts.file import sync_folder
from pipedejavu.store.checkpoint import MANIFEST, WHOLE, Checkpoint
from pipedejavu.store.manifest import CheckpointError, DamagedError, Manifest, ShardFile, TensorEntry, unreadable

LATEST = "LATEST"
KEPT = 2
"""Newest checkpoints that stay; the best one, by its loss, stays too."""


class CheckpointDir:
    """The checkpoints of one run."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint with a whole name, in order."""
        matches = (WHOLE.fullmatch(name) for name in self._names())
        return sorted(int(match[1]) for match in matches if match)

    @property
    def has_traces(self) -> bool:
        """Whether a checkpoint was ever completed here, be it damaged by now, or removed by hand."""
        return bool(self.steps()) or any(name == LATEST or ".bad" in name for name in self._names())

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self.path.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise unreadable(self.path, error) from None

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
        """Removes what was never finished; the caller makes sure that no one writes."""
        for path in self.path.glob("*.tmp"):
            remove(path)

    def newest(
        self, tell: Callable[[str], None], *, allow_restart: bool = False, is_reader: bool = False
    ) -> Checkpoint | None:
        """Returns the newest checkpoint that is what was written, or None if there never was one.

        Newer ones that are proved to be damaged are named to `tell` with the reason, and set aside as step-40.bad,
        unless the caller only reads. Raises CheckpointError, and changes nothing, if one cannot be read for any other
        reason, or if none is left; with `allow_restart` it returns None then.
        """
        found, damaged = None, dict[Path, str]()
        for step in reversed(self.steps()):
            folder = self.folder(step)
            try:
                found = Checkpoint(folder)
                found.verify()
            except DamagedError as error:
                found, damaged[folder] = None, str(error)
                continue
            except CheckpointError as error:
                raise CheckpointError(
                    f"checkpoint {folder.name} cannot be read, and nothing shows that it is damaged: {error}; it was"
                    " left as it is: solve that, or move it away to use the one before it"
                ) from None
            break
        if found is None and not allow_restart and self.has_traces:
            reasons = "".join(f"; {folder.name}: {reason}" for folder, reason in damaged.items())
            raise CheckpointError(
                f"{self.path} has held checkpoints, and none of them can be used{reasons}; nothing was changed, and"
                " --allow-restart (allow_restart=True) begins at step 0 and keeps them aside"
            )
        for folder, reason in damaged.items():
            aside = "" if is_reader else f" and is set aside as {_set_aside(folder).name}"
            tell(f"checkpoint {folder.name} cannot be used{aside}: {reason}")
        return found

    def prune(self) -> None:
        """Verifies the newest checkpoint, then deletes those that are neither among the newest nor the best.

        Raises CheckpointError, and deletes nothing, if the newest is not what was meant. A checkpoint whose manifest
        cannot be read, or is of another step, stays.
        """
        steps = self.steps()
        if not steps:
            return
        Checkpoint(self.folder(steps[-1])).verify()
        manifests = {step: found for step in steps if (found := self._manifest(step)) is not None}
        losses = {step: found.loss for step, found in manifests.items() if found.loss is not None}
        best = min(losses, key=lambda step: losses[step]) if losses else None
        for step in steps[:-KEPT]:
            if step != best and step in manifests:
                self._remove(step)

    def _remove(self, step: int) -> None:
        # The name goes first, so that no half of it looks whole.
        remove(self.folder(step).rename(self.path / f"step-{step}.tmp"))

    def _manifest(self, step: int) -> Manifest | None:
        try:
            return Checkpoint(self.folder(step)).manifest
        except CheckpointError:
            return None


def merged(
    reports: Mapping[str, tuple[ShardFile, Mapping[str, TensorEntry]]],
) -> tuple[dict[str, ShardFile], dict[str, TensorEntry]]:
    """Returns the parts and the tensors of a manifest from what was written to each part."""
    parts = {name: part for name, (part, _) in reports.items()}
    return parts, {name: entry for _, entries in reports.values() for name, entry in sorted(entries.items())}


def shard_name(number: int) -> str:
    """Returns the name of a checkpoint's n-th file."""
    return f"part-{number:05}.safetensors"


def _set_aside(folder: Path) -> Path:
    """Renames a damaged checkpoint to a name that none has; returns that name's path."""
    names = chain((f"{folder.name}.bad",), (f"{folder.name}.bad-{number}" for number in count(2)))
    aside = next(path for name in names if not os.path.lexists(path := folder.with_name(name)))
    try:
        return folder.rename(aside)
    except OSError as error:
        raise CheckpointError(f"cannot set {folder} aside as {aside.name}: {error.strerror}") from None
