"""What a checkpoint holds beside weights and state, of a run or of a user's own loop; none of it is believed unseen."""

import json
from typing import Any

import torch
from pydantic import Field

from pipedejavu.facts import FaultsError, Record
from pipedejavu.store import Checkpoint, CheckpointDir, CheckpointError, Tensors


class SavedFacts(Record):
    """The facts of a checkpoint; who writes one leaves out what it does not have."""

    norm: float | None = None
    """That delayed clipping goes on with."""
    parts: tuple[tuple[int, ...], ...] = ()
    """Of a batch, that each replica has."""
    options: dict[str, Any] = Field(default={})
    profile: dict[str, Any] = Field(default={})
    machine: dict[str, Any] = Field(default={})
    fingerprints: dict[str, str] | None = None
    """Those of the model's source and of the data; checkpoints of earlier versions have none."""
    groups: tuple[dict[str, Any], ...] | None = None
    """The settings of an optimizer's groups of parameters."""
    values: dict[str, dict[str, Any]] = Field(default={})
    """What of an optimizer's state is no tensor, by parameter."""
    scheduler: dict[str, Any] | None = None
    candidates: dict[str, Any] | None = None
    """What came of initialisations that competed before the run."""


def saved_in(checkpoint: Checkpoint) -> SavedFacts:
    """Returns a checkpoint's facts; raises CheckpointError where they are not such."""
    try:
        return SavedFacts.from_json(json.dumps(checkpoint.manifest.facts), f"the facts of {checkpoint.path}")
    except FaultsError as error:
        raise CheckpointError(str(error)) from None


def check_finite(checkpoint: Checkpoint, checkpoint_dir: CheckpointDir) -> None:
    """Raises CheckpointError for a checkpoint that is not finite, which earlier versions could write.

    Names the newest one before it that is finite.
    """
    name = checkpoint.nonfinite()
    if name is None:
        return
    sound = next(
        (
            step
            for step in reversed(checkpoint_dir.steps())
            if step < checkpoint.step and _is_finite(checkpoint_dir, step)
        ),
        None,
    )
    rest = "no checkpoint before it is finite, so begin again in another folder"
    if sound is not None:
        rest = f"remove that folder to go on behind step {sound}, the newest that is finite"
    raise CheckpointError(f"training cannot go on from {checkpoint.path}: '{name}' is not finite; {rest}")


def _is_finite(checkpoint_dir: CheckpointDir, step: int) -> bool:
    try:
        return Checkpoint(checkpoint_dir.folder(step)).nonfinite() is None
    except CheckpointError:
        return False


def random_state(rank: int = 0, device: torch.device | None = None) -> Tensors:
    """Returns the states of torch's generators, of the CPU and of a GPU."""
    found = {f"rng/{rank}": torch.get_rng_state()}
    if device is not None and device.type == "cuda":
        found[f"rng/{rank}/cuda"] = torch.cuda.get_rng_state(device)
    return found


def set_random_state(checkpoint: Checkpoint, rank: int = 0, device: torch.device | None = None) -> None:
    """Lets torch's generators go on where they were, as far as the checkpoint has them."""
    names, name = checkpoint.manifest.tensors, f"rng/{rank}"
    try:
        if name in names:
            torch.set_rng_state(checkpoint.tensor(name))
        if device is not None and device.type == "cuda" and f"{name}/cuda" in names:
            torch.cuda.set_rng_state(checkpoint.tensor(f"{name}/cuda"), device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"'{name}' of {checkpoint.path} is no state of torch's generator: {reason}") from None


def current_gpu() -> torch.device | None:
    """Returns the GPU in use, if there is one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
