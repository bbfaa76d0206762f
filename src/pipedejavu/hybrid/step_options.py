"""The options of a training step that the user gives to HybridAdamW."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pipedejavu.hybrid.activation_choice import Activations
from pipedejavu.hybrid.assignment import Assignment
from pipedejavu.hybrid.head_choice import HeadChunks
from pipedejavu.optim.moment_format import MomentFormat


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How the steps of a run are made; `HybridAdamW` explains each option."""

    clip_norm: float | None
    microbatches: int
    speculates: bool
    gpu_units: int | None
    window: int | Literal["auto"] | None
    activations: Activations | Mapping[str, Activations]
    head_chunks: HeadChunks = "auto"
    moments: MomentFormat = "fp32"
    assignment: Assignment | None = None
    """The units and places of a plan; None to find the units, and to choose the places after the first step."""

    @property
    def sums_wide(self) -> bool:
        """Whether bf16 gradients are added up in float32: those of several microbatches, if the plan says so."""
        return self.assignment is not None and self.assignment.sums_wide and self.microbatches > 1
