"""The flow of a step: gradients leave, updates run in their places, weights return in time.

It knows the units and their lanes, not the interface of an optimizer. Hooks on the model's own modules and parameters
drive it: a forward waits for its unit's weights, a gradient that is final sets out at once.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipedejavu.facts import InputError
from pipedejavu.hybrid.budget import ForwardClock, MemoryMeter, pinning_progress
from pipedejavu.hybrid.gpu_update import Launch
from pipedejavu.hybrid.gradient_bucket import GradientBucket
from pipedejavu.hybrid.lanes import HybridLanes
from pipedejavu.hybrid.model_unit import ModelUnit, find_units
from pipedejavu.hybrid.placement import (
    Placement,
    choose_placement,
    forward_room,
    leaving_room,
    wants_shadows,
    with_shadows,
)
from pipedejavu.hybrid.streamed_state import StreamBuffer, StreamedState
from pipedejavu.hybrid.unit_state import ParamState, Staging, UnitState, check_gradient, gradients_of, size_of
from pipedejavu.hybrid.update_factors import factors_of
from pipedejavu.hybrid.update_rules import UpdateRules
from pipedejavu.hybrid.window import Window

CALM_STEPS = 3
"""Unclipped steps in a row after which updates are guessed during the backward pass."""
NORM_EPS = 1e-6
"""As torch.nn.utils.clip_grad_norm_ adds to the norm before it divides."""


class StepScheduler:
    """The units of a model with their state, and the work of each step."""

    def __init__(
        self, model: nn.Module, groups: list[dict[str, Any]], lanes: HybridLanes, meter: MemoryMeter, rules: UpdateRules
    ):
        self.rules, self.lanes, self.meter, self.device = rules, lanes, meter, lanes.device
        self.plan: Placement | None = None
        self.num_skipped, self.norm = 0, 0.0
        self.num_calm = 0
        """Steps in a row that needed no clipping."""
        self.window: Window | None = None
        self.params: dict[Tensor, ParamState] = {}
        self.unit_states: list[UnitState] = []
        self.hooks: list[RemovableHandle] = []
        """On the model, which is free of the optimizer without them and behind `undo`."""
        self.undo: list[Callable[[], None]] = []
        self._home_of: dict[ParamState, UnitState] = {}
        self._uses: list[tuple[nn.Module, list[UnitState]]] = []
        self._room = StreamBuffer(lanes)
        self._free_bytes: dict[int, int] = {}
        """By unit: what visitors may still take of the GPU during its forward."""
        self._leaving_bytes: dict[int, int] = {}
        """By unit, when its gradients are final: what those of earlier units that are leaving may take of it."""
        self._is_forward = True
        self._visitors: dict[int, StreamedState] = {}
        self._clock: ForwardClock | None = None
        self._make_homes(model, groups)
        self._gathering = GradientBucket(self.params.values(), lanes)
        self._staging = Staging([], lanes, lambda _: None)
        self._witness: ParamState | None = None
        self._witnessed: tuple[int, Tensor] | None = None
        """The version of its gradient, and a copy."""

    def _make_homes(self, model: nn.Module, groups: list[dict[str, Any]]) -> None:
        group_of = {p: group for group in groups for p in group["params"] if p.requires_grad}
        unit_states: dict[ModelUnit, UnitState] = {}
        for unit in find_units(model):
            found = [(name, p) for name, p in unit.parameters.items() if p in group_of]
            params = [ParamState(name, p, group_of[p], len(self.params) + n) for n, (name, p) in enumerate(found)]
            self.params.update({param.parameter: param for param in params})
            if params:
                unit_states[unit] = UnitState(unit, len(unit_states), params, self.lanes)
                self._home_of.update(dict.fromkeys(params, unit_states[unit]))
            if used := [unit_states[u] for u in (*unit.shares, unit) if u in unit_states]:
                self._uses.append((unit.module, used))
        self.unit_states = list(unit_states.values())
        if len(self.params) < len(group_of):
            raise InputError(
                f"{len(group_of) - len(self.params)} of {len(group_of)} parameters are not in the model; give the"
                " model that has all of them"
            )

    def begin(self) -> None:
        """Begins to watch the first step; the smallest parameter that stays keeps its gradient as a witness."""
        for module, unit_states in self._uses:
            self.hooks.append(module.register_forward_pre_hook(self._before_forward(unit_states)))
        for parameter in self.params:
            self.hooks.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))  # type: ignore[no-untyped-call]
        self.meter.begin(self.unit_states)
        staying = [m for unit_state in self.unit_states for m in unit_state.params if not unit_state.is_windowed]
        self._witness = min(staying, key=lambda param: param.numel, default=None)

    def _before_forward(self, unit_states: list[UnitState]) -> Callable[..., None]:
        def wait(*_: object) -> None:
            self.drop_with_model()
            self._gathering.prune()
            for unit_state in unit_states:
                self.lanes.note("came", unit_state.index)
                self._make_way(unit_state)
                self._wait(unit_state)

        return cast(Callable[..., None], torch._dynamo.disable(wait))  # type: ignore[no-untyped-call]

    def enter(self, unit_state: UnitState) -> None:
        """Lets the compute lane wait for the weights of a block whose backward begins."""
        self.lanes.note("came", unit_state.index)
        self._wait(unit_state)

    def _wait(self, unit_state: UnitState) -> None:
        """Lets the compute lane wait for a unit's weights."""
        if unit_state.is_windowed and self.window is not None:
            self.window.enter(unit_state)
        elif self._clock is not None:
            self._clock.note(unit_state.index, unit_state.wait)
        else:
            unit_state.wait()
        self.lanes.note("began", unit_state.index)

    # --- gradients

    @torch.no_grad()
    def _on_gradient(self, parameter: Tensor) -> None:
        """Takes a gradient as soon as the backward pass has made it."""
        param = self.params[parameter]
        unit_state = self._home_of[param]
        gradient = check_gradient(unit_state, param)
        unit_state.wait()
        self._gathering.make_way(unit_state, param)
        if unit_state.is_on_host and param.arrived:
            gradient = self._accumulated(param, gradient)
        param.arrived += 1
        self._is_forward = False
        if self.plan is None and param.arrived == 1:
            self.meter.saw_gradient(unit_state, 0 if unit_state.is_on_host else size_of(unit_state).gradient_bytes)
        if param is self._witness:
            self._witnessed = gradient._version, gradient.clone()
        self._gather(unit_state, param, gradient)
        if not self._is_complete(unit_state):
            return
        self.lanes.note("ended", unit_state.index)
        self._gathering.take()
        self._gathering.let_leave(unit_state, self._leaving_bytes.get(unit_state.index, 0))
        if unit_state.is_on_host:
            self._begin_update(unit_state)
        for index in self.plan.arrivals.get(unit_state.index, ()) if self.plan is not None else ():
            self._visitors[index].come()

    def _gather(self, unit_state: UnitState, param: ParamState, gradient: Tensor) -> None:
        """Lets a gradient wait for others of its unit; one that will leave is out of the model at once."""
        if unit_state.is_on_host and param is not self._witness:
            param.parameter.grad = None
        self._gathering.add(unit_state, param, gradient)

    def _is_complete(self, unit_state: UnitState) -> bool:
        """Whether the gradients of a unit are final, as far as is known."""
        return all(param.arrived == self.rules.microbatches for param in unit_state.params)

    def _make_way(self, unit_state: UnitState) -> None:
        """Lets visitors leave before a unit's forward takes the memory that they are in."""
        if not self._is_forward:
            return  # a recompute
        if self.plan is None:
            self.meter.saw_forward(unit_state)
        elif self._visitors:
            self._room.shrink(self._free_bytes.get(unit_state.index, 0))

    def _accumulated(self, param: ParamState, gradient: Tensor) -> Tensor:
        """Returns the sum with what an earlier backward pass of this step has sent away."""
        passes, known = param.arrived + 1, self.rules.microbatches
        if self.rules.clip_norm is None and passes > known:
            raise InputError(
                f"'{param.name}' got a gradient in {passes} backward passes of one step, and without clip_norm"
                f" its update begins in pass {known}; give microbatches={passes}"
            )
        if param is self._witness:
            return gradient  # it has stayed, so autograd has added to it
        assert param.out is not None
        assert param.gradient is not None
        param.out.wait_on_device()
        earlier = param.gradient.to(self.device, non_blocking=True, copy=True).view_as(gradient)
        return earlier.add_(gradient)

    def _begin_update(self, unit_state: UnitState) -> None:
        """Starts the update of a unit whose gradients are all on their way, if it need not wait for the norm."""
        if self.rules.clip_norm is None:
            unit_state.update(
                factors_of(unit_state, 1.0),
                self._staging,
                lambda: not self._gathering.is_finite(unit_state.params),
            )
            unit_state.began_with = [param.setting() for param in unit_state.params]
        elif unit_state.params[0].spare is not None and self.num_calm:
            unit_state.guess(factors_of(unit_state, 1.0), self._proves_clipping)

    def _proves_clipping(self) -> bool:
        """Whether the norms that have arrived say already that a guess without clipping is wrong."""
        assert self.rules.clip_norm is not None
        arrived = [m for m in self.params.values() if m.arrived and m.out is not None and m.out.is_past()]
        return not self._gathering.norm(arrived) <= self.rules.clip_norm

    # --- updates

    def apply(self) -> None:
        """Updates everything that has a gradient, or queues its update; placed where the plan says."""
        if self.rules.clip_norm is not None:
            for unit_state in self.unit_states:
                unit_state.wait()
        self._gathering.take()
        on_gpu = self._prepare()  # the GPU is busy with the backward pass
        self._gathering.finish()
        if self.rules.clip_norm is not None:
            self._commit(self._scale(), on_gpu)
        else:
            self._commit_rest(on_gpu)
        for param in self.params.values():
            param.parameter.grad = None
        self.forget()
        if self.window is not None:
            self.window.restart()

    def _prepare(self) -> dict[UnitState, Launch]:
        """Returns the updates of units whose state rests on the GPU; what is missing is the scale of gradients."""
        work = [
            (unit_state, factors_of(unit_state, 1.0)) for unit_state in self.unit_states if unit_state.place == "gpu"
        ]
        return {
            unit_state: unit_state.prepare(factors, gradients_of(factors)) for unit_state, factors in work if factors
        }

    def drop(self) -> None:
        """Forgets gradients that the user does not want; too late where an update has begun."""
        if any(unit_state.began_with is not None for unit_state in self.unit_states):
            raise InputError(
                "gradients were dropped between backward and step, and without clip_norm the update has begun; give"
                " clip_norm (math.inf for no clipping) to be able to drop them"
            )
        self.forget()

    def drop_with_model(self) -> None:
        """Drops gradients where the model's own were set to None since the backward pass; refuses changed ones."""
        if self._witness is None or not self._witness.arrived:
            return
        kept = self._witness.parameter.grad
        if kept is None:
            self.drop()
            return
        assert self._witnessed is not None
        version, seen = self._witnessed
        if kept._version == version or torch.equal(kept, seen):
            return
        self._gathering.finish()
        arrived = [param for param in self.params.values() if param.arrived]
        if self.rules.clip_norm is not None and not self._gathering.is_finite(arrived):
            return  # clipping to an infinite norm, as Trainers do to know it, has made NaN of all; they are left out
        raise InputError(
            "gradients were changed between backward and step, where most of them have left the model already; clip"
            " with HybridAdamW(clip_norm=…) in place of clip_grad_norm_ (max_grad_norm=0 in a Hugging Face Trainer)"
        )

    def _scale(self) -> float | None:
        """Returns the factor of all gradients, or None where their norm is not finite."""
        assert self.rules.clip_norm is not None
        self.norm = self._gathering.norm([param for param in self.params.values() if param.arrived])
        scale = min(1.0, self.rules.clip_norm / (self.norm + NORM_EPS)) if math.isfinite(self.norm) else None
        self.num_calm = self.num_calm + 1 if scale == 1.0 else 0
        return scale

    def _commit(self, scale: float | None, on_gpu: Mapping[UnitState, Launch]) -> None:
        """Starts the update of every unit, in the order of the forward pass; first on the GPU, which idles by now."""
        if scale is None:
            self.num_skipped += 1
            return
        for update in on_gpu.values():
            update(scale)
        work = [
            (unit_state, factors_of(unit_state, scale)) for unit_state in self.unit_states if unit_state.place != "gpu"
        ]
        self._staging.expect([unit_state for unit_state, factors in work if unit_state.place == "lean" and factors])
        for unit_state, factors in work:
            if factors and unit_state.is_on_host:
                unit_state.update(factors, self._staging)
        for unit_state, factors in work:
            if factors and unit_state.place == "visit":
                self._visitors[unit_state.index].update(factors, scale)

    def _commit_rest(self, on_gpu: Mapping[UnitState, Launch]) -> None:
        """Updates what did not begin in the backward pass."""
        left_out = 0
        for unit_state in self.unit_states:
            arrived = [param for param in unit_state.params if param.arrived]
            is_finite = self._gathering.is_finite(arrived)
            left_out += not is_finite
            if unit_state.began_with is not None and unit_state.began_with != [
                param.setting() for param in unit_state.params
            ]:
                raise InputError(
                    f"the settings of '{unit_state.unit.name}' changed between backward and step, and without clip_norm"
                    " its update has begun; change them before the backward pass"
                )
            if is_finite and arrived and unit_state.began_with is None:
                if unit_state in on_gpu:
                    on_gpu[unit_state](1.0)
                else:
                    unit_state.update(factors_of(unit_state, 1.0), self._staging)
        self.num_skipped += left_out > 0

    def forget(self) -> None:
        """Leaves no gradient behind for the next step."""
        self._is_forward = True
        self._gathering.forget()
        for unit_state in self.unit_states:
            unit_state.began_with = None
        for visitor in self._visitors.values():
            visitor.cancel()
        self._room.begin()
        for param in self.params.values():
            param.arrived = 0

    # --- placement

    def settle(self) -> None:
        """Decides where the state goes, lets the gradients of host-held units leave, and allocates all of it."""
        self._gathering.take()
        sizes = [size_of(unit_state) for unit_state in self.unit_states]
        limits = self.meter.limits(self.rules.clip_norm is not None, self.rules.gpu_units)
        forwards = self.meter.forwards
        begin = max((forward.peak_bytes for forward in forwards[:2]), default=0)
        self.plan = choose_placement(sizes, self.meter.stretches, limits, begin)
        self._free_bytes = forward_room(sizes, self.plan, forwards)
        self._leaving_bytes = leaving_room(sizes, self.plan, self.meter.stretches, limits.keeps_gradients)
        if self.rules.speculates and self.rules.clip_norm is not None and self.device.type != "cuda":
            self.plan = with_shadows(self.plan, sizes, [True] * len(sizes), limits.host_bytes)
        places = list(zip(self.unit_states, self.plan.places, self.plan.is_spare, strict=True))
        with pinning_progress(self.plan.host_bytes) as progress:
            for unit_state, place, has_spare in sorted(places, key=lambda item: item[1] == "gpu"):
                if place == "gpu":
                    self._gathering.wait()
                if place == "visit":
                    self._visitors[unit_state.index] = StreamedState(unit_state, self._room, progress)
                elif unit_state.place is None:
                    unit_state.settle(place, has_spare=has_spare, progress=progress)
                elif has_spare:
                    unit_state.add_spare(progress)
                if unit_state.is_on_host:
                    for param, gradient in gradients_of(unit_state.params).items():
                        self._gather(unit_state, param, gradient)
                    self._gathering.take()
            self._staging = Staging(self.unit_states, self.lanes, progress)

    def tune(self) -> None:
        """Adds spare copies where steps go unclipped and the forward pass turns out too short for the host."""
        if self.device.type != "cuda" or self.rules.clip_norm is None or not self.rules.speculates or self.plan is None:
            return
        if self.num_calm == CALM_STEPS and not any(self.plan.is_spare):
            self._clock = ForwardClock()
        elif self.num_calm > CALM_STEPS and self._clock is not None:
            forward_s, self._clock = self._clock.seconds(), None
            sizes = [size_of(unit_state) for unit_state in self.unit_states]
            rate = self.lanes.update.busy_s / max(1, self.lanes.update.num_updated)
            host_s = [rate * size.num_parameters for size in sizes]
            wanted = wants_shadows(self.plan.places, host_s, [forward_s.get(n, 0.0) for n in range(len(sizes))])
            limits = self.meter.limits(True, self.rules.gpu_units)
            before = self.plan.host_bytes
            self.plan = with_shadows(self.plan, sizes, wanted, limits.host_bytes)
            self.synchronize()
            with pinning_progress(self.plan.host_bytes - before) as progress:
                for unit_state, is_spare in zip(self.unit_states, self.plan.is_spare, strict=True):
                    if is_spare:
                        unit_state.add_spare(progress)

    def refresh(self) -> None:
        """Takes over weights that were written into the model; those of blocks that are away have been."""
        for unit_state in self.unit_states:
            if not unit_state.is_windowed:
                unit_state.refresh()

    def synchronize(self) -> None:
        """Waits until every weight is the newest, and all state is at rest."""
        for unit_state in self.unit_states:
            unit_state.wait()
        self._room.finish()
        if self.window is not None:
            self.window.clear()
