"""Devices that run out of memory in a step of the user's own loop: one sentence in place of torch's own text."""

from contextlib import nullcontext
from typing import Protocol

import torch

from pipedejavu.facts import Span
from pipedejavu.facts.start_phase import START
from pipedejavu.program import Program


class StepShortage(torch.OutOfMemoryError):
    """A device ran out of memory in a step; loops that look for torch.OutOfMemoryError find it."""


class StepRunner(Protocol):
    """What runs the rounds of a program."""

    def run(self) -> tuple[Span, ...]:
        """Runs one round."""


def run_explained(rounds: StepRunner, program: Program, step: int) -> tuple[Span, ...]:
    """Runs a round that begins with a step; raises StepShortage in place of torch.OutOfMemoryError."""
    try:
        with nullcontext() if START.is_over else START.phase("first update"):
            spans = rounds.run()
        START.is_over = True
        return spans
    except torch.OutOfMemoryError as error:
        if isinstance(error, StepShortage):
            raise
        devices = ", ".join(dict.fromkeys(program.devices))
        said = str(error).partition("\n")[0].rstrip(".")
        plan = f"plan '{program.plan.name}' with {program.plan.feed.microbatches} microbatches"
        raise StepShortage(
            f"{devices} ran out of memory in step {step}: {plan} does not fit beside what else is there, though its"
            f" forecast does; make a new Trainer with more microbatches or a plan that recomputes ({said})"
        ) from error
