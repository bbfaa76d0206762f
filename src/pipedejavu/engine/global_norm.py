"""The norm of an update's gradients over all workers, which also tells all of them whether the update can be made.

A worker whose gradients cannot be applied adds infinity, which makes the norm infinite on all workers. With
`on_nan="skip"` they then all skip the update and restore their running statistics. With "stop" the worker raises before
it adds its part, and the others never get the norm.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pipedejavu.engine.finite import nonfinite, read_all
from pipedejavu.engine.gradient_check import GradientCheck
from pipedejavu.engine.job import Batches, Job, Log
from pipedejavu.engine.loss_scale import LossScale
from pipedejavu.engine.optimizer import Tensors
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.sharded_piece import is_sharded
from pipedejavu.facts import InputError
from pipedejavu.program import Program, Value, ValuePlace
from pipedejavu.program.program import stage_group
from pipedejavu.program.value import DEVICE, HOST, SHARD

LARGEST_SQUARE = 1e300
"""The largest squared norm of one worker that counts as finite, so that the sum over workers is finite too."""


class GlobalNorm:
    """Computes the norm on one worker, and skips updates whose norm is not finite."""

    def __init__(
        self,
        program: Program,
        index: int,
        runners: Mapping[tuple[int, int], PieceRunner],
        job: Job,
        batches: Batches,
        values: Mapping[Value, Any],
        log: Log,
        check: GradientCheck,
        scale: LossScale,
    ):
        self.program, self.index, self.runners, self.job = program, index, runners, job
        self.batches, self.values, self.log, self.check = batches, values, log, check
        self.scale = scale
        self.num_skipped = 0
        """Consecutive updates skipped so far."""
        self._kept: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        """Each buffer's dictionary and key, the buffer, and its copy from before the current update."""

    def begin(self) -> None:
        """Saves a copy of running statistics, if the update may be skipped."""
        if (self.job.on_nan == "skip" or self.scale.is_on) and self.program.plan.reduce.clip == "global":
            buffers = [buffer for runner in self.runners.values() for buffer in runner.buffers()]
            self._kept = [(place, key, buffer, buffer.clone()) for place, key, buffer in buffers]

    def find(self, update: int, step: int, add_up: Callable[[Tensor], Tensor]) -> float:
        """Returns the norm of an update's summed gradients; infinite if some worker cannot apply its gradients.

        Raises InputError if this worker cannot apply its gradients and `on_nan` is "stop", and after too many
        consecutive skips if it is "skip".
        """
        agrees = self.program.plan.reduce.clip == "global"
        count = sum(self.batches.count(i) for i in self._microbatches(step)) if self.scale.is_on else 1
        gradients, square = self._gradients(update), self._square(update) / self.scale.of_sum(count) ** 2
        is_over = self.scale.is_on and not math.isfinite(square)
        fault = self._fault(step, gradients, square) if agrees and not is_over else ""
        if fault and self.job.on_nan == "stop":
            raise InputError(f"{fault}; {self.check.remedy}")
        total = float(add_up(torch.tensor([math.inf if fault or is_over else square], dtype=torch.float64)))
        norm = math.sqrt(total)
        if self.scale.is_on:
            over = f"gradients overflow fp16 at a loss scale of {self.scale.next:g} in step {step}" if is_over else ""
            self._take_scaled(norm, step, count, fault or over)
        elif agrees and self.job.on_nan == "skip":
            self._skip(step, fault) if math.isinf(norm) else self._go_on()
        return norm

    def _take_scaled(self, norm: float, step: int, count: int, reason: str) -> None:
        """Adapts the loss scale, on all workers alike; if the update is left out, restores running statistics.

        `reason` is why this worker cannot apply the update, or "".
        """
        if not self.scale.take(norm, step, count):
            self._go_on()
            return
        self._restore_buffers()
        if reason:
            self.log.skipped[step] = reason

    def _go_on(self) -> None:
        self.num_skipped = 0
        self.begin()

    def _skip(self, step: int, fault: str) -> None:
        """Restores running statistics from before a skipped update, and records why it is skipped."""
        self._restore_buffers()
        self.num_skipped += 1
        if not fault:
            return  # the worker with the fault records it
        self.log.skipped[step] = fault
        most = self.job.max_consecutive_skips
        if most is not None and self.num_skipped >= most:
            raise InputError(
                f"{self.num_skipped} updates in a row were left out (--max-consecutive-skips {most}), the last because"
                f" {fault}; lower the learning rate, clip gradients (--clip-norm), or look at the data"
            )

    def _restore_buffers(self) -> None:
        with torch.no_grad():
            for place, key, buffer, before in self._kept:
                place[key] = buffer.copy_(before)

    def _microbatches(self, step: int) -> range:
        size = self.program.update_size
        return range((step - 1) * size, step * size)

    def _fault(self, step: int, gradients: list[Tensors], square: float) -> str:
        """Returns why this worker cannot apply an update, or ""."""
        microbatches = self._microbatches(step)
        for number in microbatches:
            loss = self.log.losses.get(number, 0.0)
            if not math.isfinite(loss):
                return f"the loss is {loss} in step {step}, microbatch {number}, on worker {self.index}"
        coefficient = 1 / sum(self.batches.count(i) for i in microbatches)
        for summed in gradients:
            if fault := self.check.fault(step, summed, coefficient, self.job.clip_norm):
                return fault
        place = f"in step {step} on worker {self.index}"
        for runner in self.runners.values():
            for name, value in nonfinite(dict(runner.saved_buffers())):
                if not runner.is_meant(name, value):
                    return f"buffer '{name}' is {value} {place}"
        return "" if square <= LARGEST_SQUARE else f"the square of the gradients' norm is {square:.3g} {place}"

    def _gradients(self, update: int) -> list[Tensors]:
        """Returns the summed gradients of each piece that this worker holds, on device or host."""
        keys = self.program.held(self.index)
        return [
            next(d for place in (DEVICE, HOST, SHARD) if (d := self._at(key, update, place)) is not None)
            for key in keys
        ]

    def _at(self, key: tuple[int, int], update: int, place: ValuePlace) -> Tensors | None:
        gradients: Tensors | None = self.values.get(Value.weight_gradient(*key, update, place))
        return gradients

    def _square(self, update: int) -> float:
        """Returns this worker's part of the squared norm; parameters on several workers count once in the total."""
        shares, norms = list[float](), list[Tensor]()
        for (piece, replica), gradients in zip(self.program.held(self.index), self._gradients(update), strict=True):
            holders = self.program.groups.get(stage_group(self.program.pieces[piece].stage))
            share = 1 / (len(holders.workers) if holders and not is_sharded(self.program, piece) else 1)
            layouts, shards = self.runners[piece, replica].layouts, self.program.plan.place.shards
            for name, gradient in gradients.items():
                tied = [len(self.program.tied_pieces[n]) for n, names in enumerate(self.job.ties) if name in names]
                copies = float(max(tied, default=1))
                if name not in layouts:
                    copies *= self.program.plan.tensor_shards
                elif self.program.plan.divides_experts:  # only replicas with the same experts have copies
                    copies /= shards
                shares.append(share / copies)
                norms.append(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        return sum(share * norm * norm for share, norm in zip(shares, read_all(norms), strict=True))
