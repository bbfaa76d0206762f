"""The updates of one step: when each begins, the clipping factor, and what a step that is not finite leaves out.

with clip_norm      all updates wait for the norm of all gradients; speculative ones may run before
without clip_norm   the update of a unit on the host begins as soon as its gradients are final
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from pipedejavu.facts import InputError
from pipedejavu.hybrid.gradient_collector import GradientCollector
from pipedejavu.hybrid.model_state import ModelState
from pipedejavu.hybrid.param_state import gradients_of
from pipedejavu.hybrid.state_placer import StatePlacer
from pipedejavu.hybrid.step_options import StepOptions
from pipedejavu.hybrid.unit_state import UnitState
from pipedejavu.hybrid.update_factors import factors_of
from pipedejavu.optim.gpu_update import Launch

NORM_EPS = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to the norm before it divides."""


class UpdateCommitter:
    """Starts the update of each unit in its place."""

    def __init__(
        self, model_state: ModelState, gradients: GradientCollector, placer: StatePlacer, options: StepOptions
    ):
        self.model_state, self.bucket, self.placer, self.options = model_state, gradients.bucket, placer, options
        self.num_skipped = 0
        """Steps that were left out, in whole or in part, because gradients were not finite."""
        self.norm = 0.0
        """The norm of all gradients of the last step before clipping."""
        self.count = 1
        """What the gradients are divided by before they are clipped: the number of samples if losses are sums."""
        self.scale: float | None = None
        """The factor of the gradients in the last step, with clipping; None if it was left out."""
        self.accept: Callable[[float], float | None] = _finite
        """Called with the norm of all gradients, not yet divided, before any of them is applied at `commit`. Returns
        the norm to clip by, or None to leave the step out if it waits for the norm; may raise an error."""
        self.num_unclipped = 0
        """Consecutive steps that needed no clipping."""

    def begin(self, unit_state: UnitState) -> None:
        """Starts the update of a unit in the backward pass, if it need not wait for the norm or can be speculative."""
        if self.options.clip_norm is None:
            unit_state.update(
                factors_of(unit_state, 1 / self.count),
                self.placer.staging,
                lambda: not self.bucket.is_finite(unit_state.params),
            )
            unit_state.began_with = _settings(unit_state)
        elif unit_state.params[0].shadow is not None and self.num_unclipped:
            unit_state.speculate(factors_of(unit_state, 1 / self.count), self._needs_clipping)

    def _needs_clipping(self) -> bool:
        """Returns whether the norms that have reached the host already exceed the limit."""
        assert self.options.clip_norm is not None
        on_host = [param for param in self.model_state.arrived if param.out is not None and param.out.is_past()]
        return not self.bucket.norm(on_host) / self.count <= self.options.clip_norm

    def commit(self) -> None:
        """Updates every unit that has gradients, or queues its update."""
        if self.options.clip_norm is not None:
            self.model_state.wait()
        self.bucket.take()
        on_gpu = self._prepare()  # while the GPU is busy with the backward pass
        self.bucket.finish()
        if self.options.clip_norm is not None:
            self.scale = self._scale()
            self._commit_all(self.scale, on_gpu)
        else:
            self.scale = 1 / self.count
            self.accept(self.bucket.norm(self.model_state.arrived))
            self._commit_rest(on_gpu, self.scale)
        for param in self.model_state.params.values():
            param.parameter.grad = None

    def _prepare(self) -> dict[UnitState, Launch]:
        """Returns the updates of units whose state rests on the GPU; each still needs the scale of the gradients."""
        on_gpu = (unit_state for unit_state in self.model_state.unit_states if unit_state.place == "gpu")
        work = [(unit_state, factors_of(unit_state, 1.0)) for unit_state in on_gpu]
        return {
            unit_state: unit_state.prepare(factors, gradients_of(factors)) for unit_state, factors in work if factors
        }

    def _scale(self) -> float | None:
        """Returns the clipping factor of all gradients, or None if their norm is not finite."""
        assert self.options.clip_norm is not None
        measured = self.bucket.norm(self.model_state.arrived)
        norm = self.accept(measured)
        self.norm = (measured if norm is None else norm) / self.count
        clipping = 0.0 if norm is None else min(1.0, self.options.clip_norm / (self.norm + NORM_EPS))
        self.num_unclipped = self.num_unclipped + 1 if clipping == 1.0 else 0
        return None if norm is None else 1 / self.count * clipping

    def _commit_all(self, scale: float | None, on_gpu: Mapping[UnitState, Launch]) -> None:
        """Starts all updates, first on the GPU, which is idle by now, then in the order of the forward pass."""
        if scale is None:
            self.num_skipped += 1
            return
        for update in on_gpu.values():
            update(scale)
        elsewhere = (unit_state for unit_state in self.model_state.unit_states if unit_state.place != "gpu")
        work = [(unit_state, factors_of(unit_state, scale)) for unit_state in elsewhere]
        staging = self.placer.staging
        staging.expect([unit_state for unit_state, factors in work if unit_state.place == "lean" and factors])
        for unit_state, factors in work:
            if factors and unit_state.is_on_host:
                unit_state.update(factors, staging)
        for unit_state, factors in reversed(work):  # the last units get their next gradients first
            if factors and unit_state.is_on_host:
                unit_state.update_moments()
        for unit_state, factors in work:
            if factors and unit_state.place == "visit":
                self.placer.streamed[unit_state.index].update(factors, scale)

    def _commit_rest(self, on_gpu: Mapping[UnitState, Launch], scale: float) -> None:
        """Starts the updates that did not begin in the backward pass."""
        left_out = 0
        for unit_state in self.model_state.unit_states:
            arrived = [param for param in unit_state.params if param.arrived]
            is_finite = self.bucket.is_finite(arrived)
            left_out += not is_finite
            if unit_state.began_with is not None and unit_state.began_with != _settings(unit_state):
                raise InputError(
                    f"the settings of '{unit_state.unit.name}' changed between backward and step, and without clip_norm"
                    " its update has begun; change them before the backward pass"
                )
            if is_finite and arrived and unit_state.began_with is None:
                if unit_state in on_gpu:
                    on_gpu[unit_state](scale)
                else:
                    unit_state.update(factors_of(unit_state, scale), self.placer.staging)
        self.num_skipped += left_out > 0


def _finite(norm: float) -> float | None:
    return norm if math.isfinite(norm) else None


def _settings(unit_state: UnitState) -> list[Any]:
    return [param.setting() for param in unit_state.params]
