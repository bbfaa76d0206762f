"""Decides, once all gradients of a step exist, whether they may be applied, as the engine decides it.

The norms that HybridAdamW computes as gradients are made are enough if they are small. Only if they are not, single
values are looked at, to name what is wrong, or to find that nothing is.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipedejavu.engine.device import CPU
from pipedejavu.engine.finite import nonfinite, read_all
from pipedejavu.engine.global_norm import LARGEST_SQUARE
from pipedejavu.engine.gradient_check import GradientCheck
from pipedejavu.engine.job import Batches, Job, Log
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.facts import InputError
from pipedejavu.hybrid.model_state import ModelState
from pipedejavu.hybrid.param_state import ParamState
from pipedejavu.program import Program


class PendingLosses:
    """Losses on their way to the host; their copies end before the norms of the same step are read."""

    def __init__(self, device: torch.device):
        self._is_pinned = device.type == "cuda"
        self._losses: list[tuple[int, Tensor]] = []

    def add(self, microbatch: int, loss: Tensor) -> None:
        """Starts the copy of a loss to the host."""
        on_host = torch.empty((), dtype=loss.dtype, pin_memory=self._is_pinned)
        self._losses.append((microbatch, on_host.copy_(loss.detach(), non_blocking=True)))

    def take(self, device: torch.device) -> list[tuple[int, float]]:
        """Returns the losses since the last call, by microbatch."""
        if self._is_pinned and self._losses:
            torch.cuda.current_stream(device).synchronize()
        losses, self._losses = self._losses, []
        return [(microbatch, loss.item()) for microbatch, loss in losses]


class StepReview:
    """Accepts or refuses the gradients of one step after another."""

    def __init__(
        self, program: Program, job: Job, batches: Batches, log: Log, runners: Sequence[PieceRunner], model: ModelState
    ):
        self.job, self.batches, self.log, self.runners, self.model = job, batches, log, runners, model
        self.check, self.device = GradientCheck(job, program.plan, 0), CPU
        self.is_global = program.plan.reduce.clip == "global"
        self.losses: list[tuple[int, float]] = []
        """The losses of the step, by microbatch."""
        self.num_skipped = 0
        """Consecutive steps that were left out."""
        self.step = 0
        self._names = {param: name for name, param in _named(runners, model)}
        self._buffers = [(runner, dict(runner.saved_buffers())) for runner in runners]
        self._kept: list[tuple[Tensor, Tensor]] = []

    def begin(self, step: int) -> None:
        """Begins a step; keeps copies of running statistics if the step may be left out."""
        self.step, self.losses = step, []
        if self.job.on_nan == "skip" and self.is_global:
            held = {id(b): b for runner in self.runners for _, _, b in runner.buffers()}
            self._kept = [(buffer, buffer.clone()) for buffer in held.values()]

    def accept(self, norm: float, count: int) -> float | None:
        """Returns the norm to clip by, or None to leave the step out; raises InputError if the run stops for it.

        `norm` is that of the sum of all gradients, added up in float32, and `count` divides it.
        """
        is_stopped = self.job.on_nan == "stop"
        if not self.is_global and not is_stopped:
            return norm if math.isfinite(norm) else None
        fault, norm = self._fault(norm, count)
        if not fault:
            self.num_skipped = 0
            return norm
        if is_stopped:
            raise InputError(f"{fault}; {self.check.remedy}")
        self._skip(fault)
        return None

    def _fault(self, norm: float, count: int) -> tuple[str, float]:
        """Returns what is wrong with the step, or "", and the norm of its gradients."""
        where = f"in step {self.step}"
        for microbatch, loss in self.losses:
            if not math.isfinite(loss):
                return f"the loss is {loss} {where}, microbatch {microbatch}, on worker 0", norm
        limit = min(self.job.optimizer.largest_gradient(self.step - 1, dtype) for dtype in self._dtypes())
        if not norm / count <= limit:  # no gradient is larger than the norm of all
            gradients = {self._names[param]: gradient for param, gradient in self._gradients()}
            clip_norm = self.job.clip_norm if self.is_global else None
            if fault := self.check.fault(self.step, gradients, 1 / count, clip_norm):
                return fault, norm
            norm = _wide_norm(list(gradients.values()))
            if not self.is_global and not math.isfinite(_narrow_norm(list(gradients.values()))):
                return f"the square of the gradients' norm is {norm * norm:.3g} {where} on worker 0", norm
        if self.is_global:
            for runner, buffers in self._buffers:
                for name, value in nonfinite(buffers):
                    if not runner.is_meant(name, value):
                        return f"buffer '{name}' is {value} {where} on worker 0", norm
        if not norm * norm <= LARGEST_SQUARE:
            return f"the square of the gradients' norm is {norm * norm:.3g} {where} on worker 0", norm
        return "", norm

    def _dtypes(self) -> set[torch.dtype]:
        return {torch.float32 if p.dtype == torch.bfloat16 else p.dtype for p in self.model.params}

    def _gradients(self) -> list[tuple[ParamState, Tensor]]:
        """Returns the gradients of the step where they are now, for looking at each."""
        for unit_state in self.model.unit_states:
            for param in unit_state.params:
                if param.out is not None:
                    param.out.wait_on_host()
        pairs = []
        for param in self.model.arrived:
            on_device = param.parameter.grad if param.wide_sum is None else param.wide_sum
            gradient = on_device if on_device is not None else param.gradient
            assert gradient is not None
            pairs.append((param, gradient.view(param.parameter.shape)))
        return pairs

    def _skip(self, fault: str) -> None:
        """Restores running statistics from before the step, and records why it is left out."""
        with torch.no_grad():
            for buffer, before in self._kept:
                buffer.copy_(before)
        self.num_skipped += 1
        self.log.skipped[self.step] = fault
        most = self.job.max_consecutive_skips
        if most is not None and self.num_skipped >= most:
            raise InputError(
                f"{self.num_skipped} updates in a row were left out (--max-consecutive-skips {most}), the last because"
                f" {fault}; lower the learning rate, clip gradients (--clip-norm), or look at the data"
            )


def _named(runners: Sequence[PieceRunner], model: ModelState) -> list[tuple[str, ParamState]]:
    """Returns each parameter of the optimizer with its first name."""
    names: Mapping[int, str] = {}
    for runner in runners:
        names = {id(p): name for name, p in runner.parameters().items()} | dict(names)
    return [(names[id(parameter)], param) for parameter, param in model.params.items()]


def _wide_norm(gradients: Sequence[Tensor]) -> float:
    """Returns the norm of all gradients, added up in float64."""
    return math.sqrt(
        sum(n * n for n in read_all([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]))
    )


def _narrow_norm(gradients: Sequence[Tensor]) -> float:
    """Returns the largest norm of one gradient, added up in float32."""
    return max(read_all([torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]))
