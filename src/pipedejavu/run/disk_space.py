"""Disk space for a run: what its checkpoints and its result need, checked before the run starts."""

import shutil
from collections.abc import Callable
from pathlib import Path

from pipedejavu.facts import InputError, Profile, format_bytes
from pipedejavu.run.run_folder import RunFolder
from pipedejavu.store.checkpoint_dir import KEPT


def check_disk_space(folder: RunFolder, profile: Profile, saves: bool, tell: Callable[[str], None]) -> None:
    """Raises InputError if one checkpoint and the result do not fit; warns if not all checkpoints to keep fit.

    Checkpoints that a resumed run has on the disk already need no further space.
    """
    free, num_existing = _free_bytes(folder.path), len(folder.checkpoint_dir.steps())
    result, each = result_bytes(profile), checkpoint_bytes(profile) if saves else 0.0
    parts = f"a checkpoint of {format_bytes(each)} and the result of {format_bytes(result)}" if saves else "its result"
    remedy = "make room, or choose another --run-dir"
    if free is None:
        return
    if free < each + result:
        raise InputError(
            f"{folder.path} needs {format_bytes(each + result)} on its disk ({parts}), and {format_bytes(free)} are"
            f" free; {remedy}"
        )
    kept = KEPT + 1  # the best one is kept as well
    most = each * max(1, kept + 1 - num_existing) + result
    if free < most:
        tell(
            f"keeping {kept} checkpoints in {folder.path} while another one is written takes {format_bytes(most)} more,"
            f" and {format_bytes(free)} are free: later ones may not be saved; {remedy}"
        )


def checkpoint_bytes(profile: Profile) -> float:
    """Returns the bytes of a model's weights and optimizer state; parameters that units share count once."""
    weights = sum(unit.parameter_bytes for unit in profile.units)
    state = sum(unit.optimizer_bytes for unit in profile.units)
    return (weights + state) * result_bytes(profile) / weights if weights else 0.0


def result_bytes(profile: Profile) -> float:
    """Returns the bytes of a model's weights; parameters that units share count once."""
    tied = sum((len(tie.units) - 1) * tie.size_bytes for tie in profile.ties)
    return max(0.0, sum(unit.parameter_bytes for unit in profile.units) - tied)


def _free_bytes(path: Path) -> int | None:
    """Returns the free bytes on the disk of a folder, which need not exist; None if the file system does not say."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    try:
        usage = shutil.disk_usage(existing)
    except OSError:
        return None
    return usage.free if usage.total else None
