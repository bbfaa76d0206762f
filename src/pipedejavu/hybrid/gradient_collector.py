"""Gradients between the backward pass and the update: received as they are made, accumulated, dropped or refused.

Most gradients leave the model during the backward pass. One parameter, the witness, keeps its gradient in the model,
so that a user who drops or changes gradients before `step` is noticed.
"""

import torch
from torch import Tensor

from pipedejavu.facts import InputError
from pipedejavu.hybrid.gradient_bucket import GradientBucket
from pipedejavu.hybrid.lanes import HybridLanes
from pipedejavu.hybrid.model_state import ModelState
from pipedejavu.hybrid.param_state import ParamState, gradients_of
from pipedejavu.hybrid.step_options import StepOptions
from pipedejavu.hybrid.unit_state import UnitState


class GradientCollector:
    """The gradients of the present step."""

    def __init__(self, model_state: ModelState, lanes: HybridLanes, options: StepOptions):
        self.model_state, self.options, self.device = model_state, options, lanes.device
        self.bucket = GradientBucket(model_state.params.values(), lanes)
        self.is_forward = True
        """Whether the backward pass of the step has not made a gradient yet."""
        staying = [param for unit in model_state.unit_states if not unit.is_windowed for param in unit.params]
        self._witness = None if options.sums_wide else min(staying, key=lambda param: param.numel, default=None)
        """The smallest parameter outside the window; None if no gradient stays in the model."""
        self._witnessed: tuple[int, Tensor] | None = None
        """The version of the witness's gradient, and a copy of it."""

    def receive(self, parameter: Tensor) -> tuple[UnitState, ParamState, Tensor]:
        """Returns a new gradient with its unit and parameter, added to the earlier ones of the step."""
        param = self.model_state.params[parameter]
        unit_state = self.model_state.unit_of(param)
        gradient = _check_gradient(unit_state, param)
        unit_state.wait()
        self.bucket.make_way(unit_state, param)
        if unit_state.is_on_host and param.arrived:
            gradient = self._accumulated(param, gradient)
        elif unit_state.gradient_dtype(param) != gradient.dtype:
            gradient = param.wide_sum = _added(param.wide_sum, gradient)
        param.arrived += 1
        self.is_forward = False
        return unit_state, param, gradient

    def keep(self, unit_state: UnitState, param: ParamState, gradient: Tensor) -> None:
        """Puts a received gradient into the bucket, and copies it if it is the witness's."""
        if param is self._witness:
            self._witnessed = gradient._version, gradient.clone()
        self.add(unit_state, param, gradient)

    def add(self, unit_state: UnitState, param: ParamState, gradient: Tensor) -> None:
        """Puts a gradient into the bucket; removes it from the model if it goes to the host or is in a wider sum."""
        if (unit_state.is_on_host and param is not self._witness) or param.wide_sum is not None:
            param.parameter.grad = None
        if unit_state.is_on_host:
            param.wide_sum = None
        self.bucket.add(unit_state, param, gradient)

    def send(self, unit_state: UnitState) -> None:
        """Sends the gradients that a unit has in the model to the host, if its state is there."""
        if unit_state.is_on_host:
            for param, gradient in gradients_of(unit_state.params).items():
                self.add(unit_state, param, gradient)
            self.bucket.take()

    def is_complete(self, unit_state: UnitState) -> bool:
        """Returns whether all gradients of a unit are final, going by the expected number of microbatches."""
        return all(param.arrived == self.options.microbatches for param in unit_state.params)

    def _accumulated(self, param: ParamState, gradient: Tensor) -> Tensor:
        """Returns the sum of a gradient and of those that earlier backward passes sent to the host."""
        passes, known = param.arrived + 1, self.options.microbatches
        if self.options.clip_norm is None and passes > known:
            raise InputError(
                f"'{param.name}' got a gradient in {passes} backward passes of one step, and without clip_norm"
                f" its update begins in pass {known}; give microbatches={passes}"
            )
        if param is self._witness:
            return gradient  # it stayed in the model, so autograd has added to it
        assert param.out is not None
        assert param.gradient is not None
        param.out.wait_on_device()
        earlier = param.gradient.to(self.device, non_blocking=True, copy=True).view_as(gradient)
        return earlier.add_(gradient)

    def were_dropped(self) -> bool:
        """Returns whether the user has set the model's gradients to None since the backward pass.

        Raises InputError if they were changed instead.
        """
        if self._witness is None or not self._witness.arrived:
            return False
        gradient = self._witness.parameter.grad
        if gradient is None:
            return True
        assert self._witnessed is not None
        version, seen = self._witnessed
        if gradient._version == version or torch.equal(gradient, seen):
            return False
        self.bucket.finish()
        if self.options.clip_norm is not None and not self.bucket.is_finite(self.model_state.arrived):
            return False  # trainers clip to an infinite norm to learn it, which makes NaN of everything; step skips it
        raise InputError(
            "gradients were changed between backward and step, where most of them have left the model already; clip"
            " with HybridAdamW(clip_norm=…) in place of clip_grad_norm_ (max_grad_norm=0 in a Hugging Face Trainer)"
        )

    def check_droppable(self) -> None:
        """Raises InputError if an update has begun with the gradients of this step."""
        if any(unit_state.began_with is not None for unit_state in self.model_state.unit_states):
            raise InputError(
                "gradients were dropped between backward and step, and without clip_norm the update has begun; give"
                " clip_norm (math.inf for no clipping) to be able to drop them"
            )

    def forget(self) -> None:
        """Drops all gradients of the step."""
        self.is_forward = True
        self.bucket.forget()
        for unit_state in self.model_state.unit_states:
            unit_state.began_with = None
        for param in self.model_state.params.values():
            param.arrived, param.wide_sum = 0, None


def _added(total: Tensor | None, gradient: Tensor) -> Tensor:
    """Adds a gradient to a sum in float32, which the first one begins; returns the sum."""
    return gradient.float() if total is None else total.add_(gradient)


def _check_gradient(unit_state: UnitState, param: ParamState) -> Tensor:
    """Returns a gradient that the backward pass has just made; raises InputError if it is wrong or unsupported."""
    gradient, device = param.parameter.grad, unit_state.lanes.device
    assert gradient is not None
    if (unit_state.updated is not None or unit_state.before is not None) and not unit_state.is_windowed:
        raise InputError(
            f"'{param.name}' was used without a call of '{unit_state.unit.name}', whose forward waits for its"
            " update; call synchronize() of the optimizer before each forward pass"
        )
    if gradient.device != device:
        raise InputError(f"HybridAdamW was made for {device}, and the model is on {gradient.device}; move it first")
    if gradient.is_sparse or gradient.dtype != param.parameter.dtype:
        kind = "sparse" if gradient.is_sparse else str(gradient.dtype)
        raise InputError(f"the gradient of '{param.name}' is {kind}; HybridAdamW takes dense {param.parameter.dtype}")
    return gradient
