"""What a checkpoint stores besides weights and optimizer state; all of it is validated when read."""

import json
from typing import Any

import torch
from pydantic import Field

from pipedejavu.facts import FaultsError, Record
from pipedejavu.store import Checkpoint, CheckpointDir, CheckpointError, Tensors


class SavedFacts(Record):
    """The facts of a checkpoint; fields that do not apply keep their defaults."""

    norm: float | None = None
    """Gradient norm that delayed clipping continues with."""
    parts: tuple[tuple[int, ...], ...] = ()
    """Samples of the batch per replica."""
    options: dict[str, Any] = Field(default={})
    profile: dict[str, Any] = Field(default={})
    machine: dict[str, Any] = Field(default={})
    fingerprints: dict[str, str] | None = None
    """Fingerprints of the model's source and of the data; None in checkpoints of earlier versions."""
    groups: tuple[dict[str, Any], ...] | None = None
    """The settings of the optimizer's parameter groups."""
    values: dict[str, dict[str, Any]] = Field(default={})
    """Optimizer state that is not a tensor, by parameter."""
    scheduler: dict[str, Any] | None = None
    left: dict[int, int] = Field(default={})
    """Replicas whose workers had died while the others went on, with the last of their updates."""
    candidates: dict[str, Any] | None = None
    """Results of the initialisation trials before the run."""


def saved_in(checkpoint: Checkpoint) -> SavedFacts:
    """Returns a checkpoint's facts; raises CheckpointError if they are malformed."""
    try:
        return SavedFacts.from_json(json.dumps(checkpoint.manifest.facts), f"the facts of {checkpoint.path}")
    except FaultsError as error:
        raise CheckpointError(str(error)) from None


def check_finite(checkpoint: Checkpoint, checkpoint_dir: CheckpointDir) -> None:
    """Raises CheckpointError if a tensor of a checkpoint is not finite; earlier versions could save such ones.

    The error names the newest earlier checkpoint that is finite.
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
        rest = f"remove that folder to go on after step {sound}, the newest that is finite"
    raise CheckpointError(f"training cannot go on from {checkpoint.path}: '{name}' is not finite; {rest}")


def _is_finite(checkpoint_dir: CheckpointDir, step: int) -> bool:
    try:
        return Checkpoint(checkpoint_dir.folder(step)).nonfinite() is None
    except CheckpointError:
        return False


def random_state(rank: int = 0, device: torch.device | None = None) -> Tensors:
    """Returns the states of torch's random generators, of the CPU and of `device` if it is a GPU."""
    states = {f"rng/{rank}": torch.get_rng_state()}
    if device is not None and device.type == "cuda":
        states[f"rng/{rank}/cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(checkpoint: Checkpoint, rank: int = 0, device: torch.device | None = None) -> None:
    """Restores the states of torch's random generators that the checkpoint has."""
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
    """Returns the current CUDA device, or None without a GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
