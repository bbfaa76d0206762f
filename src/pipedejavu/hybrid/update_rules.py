"""What a user asks of the updates of a run."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class UpdateRules:
    """How the updates of a run are made."""

    clip_norm: float | None
    microbatches: int
    speculates: bool
    gpu_units: int | None
