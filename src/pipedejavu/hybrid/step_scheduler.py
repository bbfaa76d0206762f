"""The course of a step: gradients leave, updates run where the state rests, and weights return in time.

Hooks on the model drive it. A forward waits for the weights of its unit; a gradient is sent on as soon as it is made.

    GradientCollector   receives gradients, notices dropped and changed ones
    StatePlacer         decides where state rests, allocates it
    UpdateCommitter     starts the updates
    Window              brings weights that rest on the host to the GPU
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipedejavu.hybrid.activation_choice import Activations, set_activations
from pipedejavu.hybrid.budget import MemoryMeter
from pipedejavu.hybrid.gradient_collector import GradientCollector
from pipedejavu.hybrid.head_choice import HeadChoice, chunked_names
from pipedejavu.hybrid.lanes import HybridLanes
from pipedejavu.hybrid.model_state import ModelState
from pipedejavu.hybrid.model_unit import ModelUnit, find_units, given_units
from pipedejavu.hybrid.placement import Placement
from pipedejavu.hybrid.state_placer import RETIMED_STEPS, TIMED_STEP, UNCLIPPED_STEPS, StatePlacer
from pipedejavu.hybrid.step_options import StepOptions
from pipedejavu.hybrid.training_hook import TrainingHook
from pipedejavu.hybrid.unit_state import UnitState
from pipedejavu.hybrid.update_committer import UpdateCommitter
from pipedejavu.hybrid.window import assigned_window, open_window

GUARDED_STEPS = 2
"""Steps that are repeated with a smaller plan if memory runs out: the measured one, and the first with its plan."""


class StepScheduler:
    """Runs the steps of one model; hooked into it from its construction to `release`."""

    def __init__(
        self,
        model: nn.Module,
        groups: list[dict[str, Any]],
        lanes: HybridLanes,
        meter: MemoryMeter,
        options: StepOptions,
    ):
        """Hooks itself into the model and moves it to the device; raises InputError before it changes the model."""
        self.lanes, self.meter, self.options = lanes, meter, options
        self.is_active = True
        """Whether passes of the model belong to its training; other forwards only wait for weights."""
        assignment = options.assignment
        found = find_units(model) if assignment is None else given_units(assignment.units)
        self.model_state = ModelState(found, groups, lanes, options.moments)
        for unit_state in self.unit_states:
            unit_state.sums_wide = options.sums_wide
        if assignment is None:
            self.window = open_window(model, self.unit_states, lanes, meter, options.window)
            meter.check(self.model_state.sizes, options.clip_norm is not None, options.gpu_units)
        else:
            self.window = assigned_window(self.unit_states, lanes, assignment)
        if assignment is None:
            meter.warm_host(self.model_state.sizes, options.clip_norm is not None, options.gpu_units)
        chunked, activations = chunked_names(options.activations)
        self._undo_activations = self._set_activations(activations)
        self.head = HeadChoice(model, self.unit_states, options.head_chunks, chunked, meter)
        self._undo: list[Callable[[], None]] = [self.head.release]
        self.num_steps = 0
        self._hooks: list[RemovableHandle] = []
        if self.window is None:
            model.to(lanes.device)
        else:
            self._hooks += self.window.fill(model, self._enter)
            self._undo.append(self.window.release)
        self.gradients = GradientCollector(self.model_state, lanes, options)
        self.placer = StatePlacer(self.model_state, lanes, meter, options, self.head)
        self.updates = UpdateCommitter(self.model_state, self.gradients, self.placer, options)
        self.placer.begin()
        self._add_hooks(model)
        meter.begin(self.unit_states)

    def _add_hooks(self, model: nn.Module) -> None:
        for module, unit_states in self.model_state.uses:
            self._hooks.append(module.register_forward_pre_hook(self._hook(self._before_forward(unit_states))))
        for parameter in self.model_state.params:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._hook(self._on_gradient)))  # type: ignore[no-untyped-call]
        self._hooks += [
            model.register_state_dict_pre_hook(lambda *_: self.synchronize()),  # type: ignore[no-untyped-call]
            model.register_load_state_dict_pre_hook(lambda *_: self.synchronize()),  # type: ignore[no-untyped-call]
            model.register_load_state_dict_post_hook(lambda *_: self.model_state.refresh()),  # type: ignore[no-untyped-call]
        ]

    def _hook(self, call: Callable[..., None]) -> Callable[..., None]:
        """Returns a hook; that of a given assignment leaves the model one that can be traced, copied and pickled."""
        return call if self.options.assignment is None else TrainingHook(call)

    def release(self) -> None:
        """Removes all hooks and restores the model's forwards."""
        for hook in self._hooks:
            hook.remove()
        for undo in (*self._undo_activations, *self._undo):
            undo()

    def _set_activations(self, choice: Activations | Mapping[str, Activations]) -> list[Callable[[], None]]:
        blocks = [unit_state.unit for unit_state in self.unit_states]
        if self.options.assignment is not None:  # units without trained parameters too
            blocks = [ModelUnit(name, module, is_block=True) for name, module in self.options.assignment.units]
        return set_activations(blocks, choice, self.lanes)

    def recompute_all(self) -> None:
        """Makes all blocks recompute what their backward needs, from their next forward on."""
        for undo in self._undo_activations:
            undo()
        self._undo_activations = self._set_activations("recompute")
        self.options = replace(self.options, activations="recompute")

    @property
    def is_guarded(self) -> bool:
        """Whether the first steps have not ended, in which no update begins before `step`: they can be repeated."""
        return self.num_steps < GUARDED_STEPS

    @property
    def unit_states(self) -> list[UnitState]:
        """The units of the model in order."""
        return self.model_state.unit_states

    @property
    def plan(self) -> Placement | None:
        """Where the state of each unit rests; None before the first step."""
        return self.placer.plan

    def _before_forward(self, unit_states: list[UnitState]) -> Callable[..., None]:
        def wait(*_: object) -> None:
            if not self.is_active:
                for unit_state in unit_states:
                    unit_state.wait()
                return
            self.drop_with_model()
            self.gradients.bucket.prune()
            for unit_state in unit_states:
                self.lanes.note("came", unit_state.index)
                if self.gradients.is_forward:  # else it is a recomputation
                    self.placer.saw_forward(unit_state)
                self._wait(unit_state)

        return cast(Callable[..., None], torch._dynamo.disable(wait))  # type: ignore[no-untyped-call]

    def _enter(self, unit_state: UnitState) -> None:
        """Makes the compute lane wait for the weights of a block whose backward begins."""
        self.lanes.note("came", unit_state.index)
        self._wait(unit_state)

    def _wait(self, unit_state: UnitState) -> None:
        """Makes the compute lane wait for the weights of a unit."""
        window = self.window if unit_state.is_windowed else None
        wait = unit_state.wait if window is None else partial(window.enter, unit_state)
        if self.placer.clock is not None:
            self.placer.clock.note(unit_state.index, wait)
        else:
            wait()
        self.lanes.note("began", unit_state.index)

    @torch.no_grad()
    def _on_gradient(self, parameter: Tensor) -> None:
        """Takes a gradient as soon as the backward pass has made it."""
        if not self.is_active:
            return
        unit_state, param, gradient = self.gradients.receive(parameter)
        self.placer.saw_gradient(unit_state, param)
        self.gradients.keep(unit_state, param, gradient)
        if not self.gradients.is_complete(unit_state):
            return
        self.lanes.note("ended", unit_state.index)
        self.gradients.bucket.take()
        self.gradients.bucket.let_leave(unit_state, self.placer.leaving_bytes(unit_state))
        if unit_state.is_on_host and not self.is_guarded:
            self.head.weights_change(unit_state)
            self.updates.begin(unit_state)
        self.placer.fetch_after(unit_state)
        self.placer.let_leave(self.gradients)

    @torch.no_grad()
    def complete(self) -> None:
        """Gives a gradient of zeros to each parameter that had none in any backward pass of the step."""
        for param in self.model_state.params.values():
            if not param.arrived:
                param.parameter.grad = torch.zeros_like(param.parameter, device=self.lanes.device)
                self._on_gradient(param.parameter)

    def settle(self) -> None:
        """Decides where the state rests and allocates it, after the first backward pass."""
        self.placer.settle(self.gradients)

    def apply(self) -> None:
        """Updates everything that has a gradient, or queues its update."""
        self.head.weights_change()
        if self.placer.clock is not None:
            self.placer.clock.end()
        self.updates.commit()
        self.num_steps += 1
        self._forget()
        if self.window is not None:
            self.window.restart()

    def drop(self) -> None:
        """Drops the gradients since the last step; raises InputError if an update has begun with them."""
        self.gradients.check_droppable()
        self._forget()

    def drop_with_model(self) -> None:
        """Drops the gradients if the user has set the model's to None; raises InputError if they were changed."""
        if self.gradients.were_dropped():
            self.drop()

    def _forget(self) -> None:
        self.gradients.forget()
        self.placer.forget()

    def tune(self) -> None:
        """Shortens what follows the norm, if the forward pass is too short to hide the host's updates.

        State goes to other places if the times of a step ask for them, moments are written after the weights, and if
        steps go unclipped, units get shadow state.
        """
        placer, num_unclipped = self.placer, self.updates.num_unclipped
        if self.options.clip_norm is None:
            return
        if self.lanes.device.type != "cuda":
            if self.num_steps == 1:
                placer.defer_moments(None)
            return
        if placer.clock is not None:
            times = placer.end_timing()
            if (plan := placer.better_plan(times)) is not None:
                self.synchronize()
                placer.change_to(plan)
            placer.defer_moments(times)
            if self.options.speculates and num_unclipped > UNCLIPPED_STEPS:
                self.synchronize()
                placer.add_shadow_state(times)
        elif self._is_timed_next():
            placer.begin_timing()

    def _is_timed_next(self) -> bool:
        is_due = self.num_steps == TIMED_STEP - 1 or (self.num_steps + 1) % RETIMED_STEPS == 0
        return is_due or (self.options.speculates and self.updates.num_unclipped == UNCLIPPED_STEPS)

    def synchronize(self) -> None:
        """Waits until every weight is up to date and all state is at rest."""
        self.model_state.wait()
        self.model_state.wait_for_moments()
        self.placer.buffer.finish()
        if self.window is not None:
            self.window.clear()
