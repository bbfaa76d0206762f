"""Dynamic loss scaling for fp16, by the rule of `torch.amp.GradScaler`: all workers follow the same norms.

Backward passes start from the scale instead of one, so that small gradients are not rounded to zero. An update whose
gradients overflow is left out, and the scale is halved; after many clean updates it is doubled.
"""

import math

import torch
from torch import Tensor

from pipedejavu.engine.job import Batches
from pipedejavu.facts import InputError
from pipedejavu.plan import Plan
from pipedejavu.program import Program

FIRST, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000
"""The first scale, its factors after a clean interval and after an overflow, and the updates of an interval."""
SAVED = "scale/loss"
"""The name of the scale in a checkpoint: the next one, and the counts of clean and of skipped updates."""


class LossScale:
    """The scale of one worker's loss, which is the same on all workers; 1 unless the precision is fp16."""

    def __init__(self, plan: Plan):
        self.is_on = plan.precision.compute == "fp16"
        self.next = FIRST if self.is_on else 1.0
        """The scale of the mean loss in the next backward."""
        self.applied = 1.0
        """The scale of the summed gradients of the update that is made next."""
        self.num_clean = self.num_skipped = 0
        """Updates since the last change of the scale, and consecutive updates left out."""

    def saved(self) -> dict[str, Tensor]:
        """Returns what a checkpoint keeps of it, by name; nothing unless the precision is fp16."""
        numbers = [self.next, self.num_clean, self.num_skipped]
        return {SAVED: torch.tensor(numbers, dtype=torch.float64)} if self.is_on else {}

    def restore(self, saved: Tensor | None) -> None:
        """Restores a saved scale; keeps the initial one if the checkpoint, of another precision, has none.

        Raises InputError if it cannot have been saved.
        """
        if saved is None or not self.is_on:
            return
        scale, num_clean, num_skipped = saved.tolist() if saved.shape == (3,) else (math.nan,) * 3
        if not (scale > 0 and math.isfinite(scale) and 0 <= num_clean < INTERVAL and num_skipped >= 0):
            raise InputError(
                f"the checkpoint has a loss scale of {scale:g} after {num_clean:g} clean updates, and needs one above 0"
                f" after 0 to {INTERVAL - 1}; go on from an earlier checkpoint"
            )
        self.next, self.num_clean, self.num_skipped = scale, int(num_clean), int(num_skipped)

    def of_sum(self, count: int) -> float:
        """Returns the scale of a loss that is summed over `count` samples or tokens: a power of two, so it is exact."""
        return self.next / 2.0 ** max(0, count - 1).bit_length() if self.is_on else 1.0

    def of_microbatch(self, program: Program, batches: Batches, number: int) -> float:
        """Returns the factor of a microbatch's loss in its backward."""
        if not self.is_on:
            return 1.0
        first = number // program.update_size * program.update_size
        return self.of_sum(sum(batches.count(first + n) for n in range(program.update_size)))

    def take(self, norm: float, step: int, count: int) -> bool:
        """Takes the norm of an update of `count` samples or tokens; returns whether it overflowed.

        Raises InputError if no scale can help.
        """
        self.applied, is_over = self.of_sum(count), not math.isfinite(norm)
        if not is_over:
            self.num_skipped, self.num_clean = 0, self.num_clean + 1
            if self.num_clean == INTERVAL:
                self.next, self.num_clean = self.next * GROWTH, 0
            return False
        self.num_skipped += 1
        if self.next <= 1:
            raise InputError(
                f"gradients overflow fp16 in step {step} even at a loss scale of {self.next:g}, after"
                f" {self.num_skipped} updates in a row were left out; train with precision bf16 or fp32"
            )
        self.next, self.num_clean = self.next * BACKOFF, 0
        return True
