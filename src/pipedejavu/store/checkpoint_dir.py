"""The folder of a run's checkpoints: step-40/ with its shard files and manifest, and LATEST, the newest one's name.

A checkpoint is written to step-40.tmp/. Once its files are synced to disk the folder is renamed to step-40/, its parent
is synced, and LATEST is updated; so a name without .tmp is a complete checkpoint even after a power cut. Older
checkpoints are deleted only after the new one has been read back and verified. A checkpoint that is proved damaged is
renamed to step-40.bad and never deleted; one that merely cannot be read is left alone, and reading it raises.
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
"""How many of the newest checkpoints are kept; the one with the lowest loss is kept too."""


class CheckpointDir:
    """The checkpoints of one run."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, in ascending order."""
        matches = (WHOLE.fullmatch(name) for name in self._names())
        return sorted(int(match[1]) for match in matches if match)

    @property
    def has_traces(self) -> bool:
        """Whether a checkpoint was ever completed here, even if it has been damaged or removed since."""
        return bool(self.steps()) or any(name == LATEST or ".bad" in name for name in self._names())

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self.path.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise unreadable(self.path, error) from None

    def folder(self, step: int) -> Path:
        """Returns the folder of a step's checkpoint."""
        return self.path / f"step-{step}"

    def staging_dir(self, step: int) -> Path:
        """Creates and returns the folder that a checkpoint's shard files are written to."""
        path = self.path / f"step-{step}.tmp"
        if path.is_symlink():  # made by another program; do not write through it
            remove(path)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def commit(self, step: int, manifest: Manifest) -> Path:
        """Completes a checkpoint whose shard files are synced: writes its manifest, renames it, and updates LATEST."""
        staging, folder = self.staging_dir(step), self.folder(step)
        replace_file(staging / MANIFEST, manifest.to_bytes())
        staging.rename(folder)
        sync_folder(self.path)
        replace_file(self.path / LATEST, f"{folder.name}\n".encode())
        return folder

    def discard(self, step: int) -> None:
        """Removes an incomplete checkpoint."""
        remove(self.path / f"step-{step}.tmp")

    def collect(self) -> None:
        """Removes all incomplete checkpoints; the caller ensures that none is being written."""
        for path in self.path.glob("*.tmp"):
            remove(path)

    def newest(
        self, tell: Callable[[str], None], *, allow_restart: bool = False, is_reader: bool = False
    ) -> Checkpoint | None:
        """Returns the newest checkpoint that verifies, or None if there never was one.

        Newer ones that are proved damaged are reported to `tell` with the reason and renamed to step-40.bad, unless
        `is_reader`. Raises CheckpointError and changes nothing if a checkpoint cannot be read for another reason, or if
        none is left; with `allow_restart` it returns None if none is left.
        """
        checkpoint, damaged = None, dict[Path, str]()
        for step in reversed(self.steps()):
            folder = self.folder(step)
            try:
                checkpoint = Checkpoint(folder)
                checkpoint.verify()
            except DamagedError as error:
                checkpoint, damaged[folder] = None, str(error)
                continue
            except CheckpointError as error:
                raise CheckpointError(
                    f"checkpoint {folder.name} cannot be read, and nothing shows that it is damaged: {error}; it was"
                    " left as it is: solve that, or move it away to use the one before it"
                ) from None
            break
        if checkpoint is None and not allow_restart and self.has_traces:
            reasons = "".join(f"; {folder.name}: {reason}" for folder, reason in damaged.items())
            raise CheckpointError(
                f"{self.path} has held checkpoints, and none of them can be used{reasons}; nothing was changed, and"
                " --allow-restart (allow_restart=True) begins at step 0 and keeps them aside"
            )
        for folder, reason in damaged.items():
            aside = "" if is_reader else f" and is set aside as {_set_aside(folder).name}"
            tell(f"checkpoint {folder.name} cannot be used{aside}: {reason}")
        return checkpoint

    def prune(self) -> None:
        """Verifies the newest checkpoint, then deletes those that are neither among the newest nor the best.

        Raises CheckpointError and deletes nothing if the newest does not verify. A checkpoint is kept if its manifest
        cannot be read or belongs to another step.
        """
        steps = self.steps()
        if not steps:
            return
        Checkpoint(self.folder(steps[-1])).verify()
        manifests = {step: manifest for step in steps if (manifest := self._manifest(step)) is not None}
        losses = {step: manifest.loss for step, manifest in manifests.items() if manifest.loss is not None}
        best = min(losses, key=lambda step: losses[step]) if losses else None
        for step in steps[:-KEPT]:
            if step != best and step in manifests:
                self._remove(step)

    def _remove(self, step: int) -> None:
        # Renamed first, so that a half-deleted checkpoint never looks complete.
        remove(self.folder(step).rename(self.path / f"step-{step}.tmp"))

    def _manifest(self, step: int) -> Manifest | None:
        try:
            return Checkpoint(self.folder(step)).manifest
        except CheckpointError:
            return None


def merged(
    reports: Mapping[str, tuple[ShardFile, Mapping[str, TensorEntry]]],
) -> tuple[dict[str, ShardFile], dict[str, TensorEntry]]:
    """Returns the manifest's shard files and tensors from what each rank reports to have written."""
    shards = {name: shard for name, (shard, _) in reports.items()}
    return shards, {name: entry for _, entries in reports.values() for name, entry in sorted(entries.items())}


def shard_name(number: int) -> str:
    """Returns the name of the n-th shard file."""
    return f"part-{number:05}.safetensors"


def _set_aside(folder: Path) -> Path:
    """Renames a damaged checkpoint to an unused name; returns the new path."""
    names = chain((f"{folder.name}.bad",), (f"{folder.name}.bad-{number}" for number in count(2)))
    aside = next(path for name in names if not os.path.lexists(path := folder.with_name(name)))
    try:
        return folder.rename(aside)
    except OSError as error:
        raise CheckpointError(f"cannot set {folder} aside as {aside.name}: {error.strerror}") from None
