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
from pipedejavu.hybrid.arithmetic import Scalars, scalars_of
from pipedejavu.hybrid.budget import ForwardClock, Meter, pinning_progress
from pipedejavu.hybrid.gather import Gathering
from pipedejavu.hybrid.gpu import Launch
from pipedejavu.hybrid.home import Home, Member, Staging, check_gradient, gradients_of, size_of
from pipedejavu.hybrid.lane import Lanes
from pipedejavu.hybrid.placement import (
    Placement,
    choose_placement,
    forward_room,
    leaving_room,
    wants_spares,
    with_spares,
)
from pipedejavu.hybrid.rule import Rules
from pipedejavu.hybrid.unit import ModelUnit, find_units
from pipedejavu.hybrid.visitor import Room, Visitor
from pipedejavu.hybrid.window import Window

CALM_STEPS = 3
"""Unclipped steps in a row after which updates are guessed during the backward pass."""
NORM_EPS = 1e-6
"""As torch.nn.utils.clip_grad_norm_ adds to the norm before it divides."""


class Flow:
    """The units of a model with their state, and the work of each step."""

    def __init__(self, model: nn.Module, groups: list[dict[str, Any]], lanes: Lanes, meter: Meter, rules: Rules):
        self.rules, self.lanes, self.meter, self.device = rules, lanes, meter, lanes.device
        self.plan: Placement | None = None
        self.num_skipped, self.norm = 0, 0.0
        self.num_calm = 0
        """Steps in a row that needed no clipping."""
        self.window: Window | None = None
        self.members: dict[Tensor, Member] = {}
        self.homes: list[Home] = []
        self.hooks: list[RemovableHandle] = []
        """On the model, which is free of the optimizer without them and behind `undo`."""
        self.undo: list[Callable[[], None]] = []
        self._home_of: dict[Member, Home] = {}
        self._uses: list[tuple[nn.Module, list[Home]]] = []
        self._room = Room(lanes)
        self._free_bytes: dict[int, int] = {}
        """By unit: what visitors may still take of the GPU during its forward."""
        self._leaving_bytes: dict[int, int] = {}
        """By unit, when its gradients are final: what those of earlier units that are leaving may take of it."""
        self._is_forward = True
        self._visitors: dict[int, Visitor] = {}
        self._clock: ForwardClock | None = None
        self._make_homes(model, groups)
        self._gathering = Gathering(self.members.values(), lanes)
        self._staging = Staging([], lanes, lambda _: None)
        self._witness: Member | None = None
        self._witnessed: tuple[int, Tensor] | None = None
        """The version of its gradient, and a copy."""

    def _make_homes(self, model: nn.Module, groups: list[dict[str, Any]]) -> None:
        group_of = {p: group for group in groups for p in group["params"] if p.requires_grad}
        homes: dict[ModelUnit, Home] = {}
        for unit in find_units(model):
            found = [(name, p) for name, p in unit.parameters.items() if p in group_of]
            members = [Member(name, p, group_of[p], len(self.members) + n) for n, (name, p) in enumerate(found)]
            self.members.update({member.parameter: member for member in members})
            if members:
                homes[unit] = Home(unit, len(homes), members, self.lanes)
                self._home_of.update(dict.fromkeys(members, homes[unit]))
            if used := [homes[u] for u in (*unit.shares, unit) if u in homes]:
                self._uses.append((unit.module, used))
        self.homes = list(homes.values())
        if len(self.members) < len(group_of):
            raise InputError(
                f"{len(group_of) - len(self.members)} of {len(group_of)} parameters are not in the model; give the"
                " model that has all of them"
            )

    def begin(self) -> None:
        """Begins to watch the first step; the smallest parameter that stays keeps its gradient as a witness."""
        for module, homes in self._uses:
            self.hooks.append(module.register_forward_pre_hook(self._before_forward(homes)))
        for parameter in self.members:
            self.hooks.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))  # type: ignore[no-untyped-call]
        self.meter.begin(self.homes)
        staying = [m for home in self.homes for m in home.members if not home.is_windowed]
        self._witness = min(staying, key=lambda member: member.numel, default=None)

    def _before_forward(self, homes: list[Home]) -> Callable[..., None]:
        def wait(*_: object) -> None:
            self.drop_with_model()
            self._gathering.prune()
            for home in homes:
                self.lanes.note("came", home.index)
                self._make_way(home)
                self._wait(home)

        return cast(Callable[..., None], torch._dynamo.disable(wait))  # type: ignore[no-untyped-call]

    def enter(self, home: Home) -> None:
        """Lets the compute lane wait for the weights of a block whose backward begins."""
        self.lanes.note("came", home.index)
        self._wait(home)

    def _wait(self, home: Home) -> None:
        """Lets the compute lane wait for a unit's weights."""
        if home.is_windowed and self.window is not None:
            self.window.enter(home)
        elif self._clock is not None:
            self._clock.note(home.index, home.wait)
        else:
            home.wait()
        self.lanes.note("began", home.index)

    # --- gradients

    @torch.no_grad()
    def _on_gradient(self, parameter: Tensor) -> None:
        """Takes a gradient as soon as the backward pass has made it."""
        member = self.members[parameter]
        home = self._home_of[member]
        gradient = check_gradient(home, member)
        home.wait()
        self._gathering.make_way(home, member)
        if home.is_on_host and member.arrived:
            gradient = self._accumulated(member, gradient)
        member.arrived += 1
        self._is_forward = False
        if self.plan is None and member.arrived == 1:
            self.meter.saw_gradient(home, 0 if home.is_on_host else size_of(home).gradient_bytes)
        if member is self._witness:
            self._witnessed = gradient._version, gradient.clone()
        self._gather(home, member, gradient)
        if not self._is_complete(home):
            return
        self.lanes.note("ended", home.index)
        self._gathering.take()
        self._gathering.let_leave(home, self._leaving_bytes.get(home.index, 0))
        if home.is_on_host:
            self._begin_update(home)
        for index in self.plan.arrivals.get(home.index, ()) if self.plan is not None else ():
            self._visitors[index].come()

    def _gather(self, home: Home, member: Member, gradient: Tensor) -> None:
        """Lets a gradient wait for others of its unit; one that will leave is out of the model at once."""
        if home.is_on_host and member is not self._witness:
            member.parameter.grad = None
        self._gathering.add(home, member, gradient)

    def _is_complete(self, home: Home) -> bool:
        """Whether the gradients of a unit are final, as far as is known."""
        return all(member.arrived == self.rules.microbatches for member in home.members)

    def _make_way(self, home: Home) -> None:
        """Lets visitors leave before a unit's forward takes the memory that they are in."""
        if not self._is_forward:
            return  # a recompute
        if self.plan is None:
            self.meter.saw_forward(home)
        elif self._visitors:
            self._room.shrink(self._free_bytes.get(home.index, 0))

    def _accumulated(self, member: Member, gradient: Tensor) -> Tensor:
        """Returns the sum with what an earlier backward pass of this step has sent away."""
        passes, known = member.arrived + 1, self.rules.microbatches
        if self.rules.clip_norm is None and passes > known:
            raise InputError(
                f"'{member.name}' got a gradient in {passes} backward passes of one step, and without clip_norm its"
                f" update begins in pass {known}; give microbatches={passes}"
            )
        if member is self._witness:
            return gradient  # it has stayed, so autograd has added to it
        assert member.out is not None
        assert member.gradient is not None
        member.out.wait_on_device()
        earlier = member.gradient.to(self.device, non_blocking=True, copy=True).view_as(gradient)
        return earlier.add_(gradient)

    def _begin_update(self, home: Home) -> None:
        """Starts the update of a unit whose gradients are all on their way, if it need not wait for the norm."""
        if self.rules.clip_norm is None:
            home.update(self._factors(home, 1.0), self._staging, lambda: not self._gathering.is_finite(home.members))
            home.began_with = list(map(_setting, home.members))
        elif home.members[0].spare is not None and self.num_calm:
            home.guess(self._factors(home, 1.0), self._proves_clipping)

    def _proves_clipping(self) -> bool:
        """Whether the norms that have arrived say already that a guess without clipping is wrong."""
        assert self.rules.clip_norm is not None
        arrived = [m for m in self.members.values() if m.arrived and m.out is not None and m.out.is_past()]
        return not self._gathering.norm(arrived) <= self.rules.clip_norm

    # --- updates

    def apply(self) -> None:
        """Updates everything that has a gradient, or queues its update; placed where the plan says."""
        if self.rules.clip_norm is not None:
            for home in self.homes:
                home.wait()
        self._gathering.take()
        on_gpu = self._prepare()  # the GPU is busy with the backward pass
        self._gathering.finish()
        if self.rules.clip_norm is not None:
            self._commit(self._scale(), on_gpu)
        else:
            self._commit_rest(on_gpu)
        for member in self.members.values():
            member.parameter.grad = None
        self.forget()
        if self.window is not None:
            self.window.restart()

    def _prepare(self) -> dict[Home, Launch]:
        """Returns the updates of units whose state rests on the GPU; what is missing is the scale of gradients."""
        work = [(home, self._factors(home, 1.0)) for home in self.homes if home.place == "gpu"]
        return {home: home.prepare(factors, gradients_of(factors)) for home, factors in work if factors}

    def drop(self) -> None:
        """Forgets gradients that the user does not want; too late where an update has begun."""
        if any(home.began_with is not None for home in self.homes):
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
        arrived = [member for member in self.members.values() if member.arrived]
        if self.rules.clip_norm is not None and not self._gathering.is_finite(arrived):
            return  # clipping to an infinite norm, as Trainers do to know it, has made NaN of all; they are left out
        raise InputError(
            "gradients were changed between backward and step, where most of them have left the model already; clip"
            " with HybridAdamW(clip_norm=…) in place of clip_grad_norm_ (max_grad_norm=0 in a Hugging Face Trainer)"
        )

    def _scale(self) -> float | None:
        """Returns the factor of all gradients, or None where their norm is not finite."""
        assert self.rules.clip_norm is not None
        self.norm = self._gathering.norm([member for member in self.members.values() if member.arrived])
        scale = min(1.0, self.rules.clip_norm / (self.norm + NORM_EPS)) if math.isfinite(self.norm) else None
        self.num_calm = self.num_calm + 1 if scale == 1.0 else 0
        return scale

    def _commit(self, scale: float | None, on_gpu: Mapping[Home, Launch]) -> None:
        """Starts the update of every unit, in the order of the forward pass; first on the GPU, which idles by now."""
        if scale is None:
            self.num_skipped += 1
            return
        for update in on_gpu.values():
            update(scale)
        work = [(home, self._factors(home, scale)) for home in self.homes if home.place != "gpu"]
        self._staging.expect([home for home, factors in work if home.place == "lean" and factors])
        for home, factors in work:
            if factors and home.is_on_host:
                home.update(factors, self._staging)
        for home, factors in work:
            if factors and home.place == "visit":
                self._visitors[home.index].update(factors, scale)

    def _commit_rest(self, on_gpu: Mapping[Home, Launch]) -> None:
        """Updates what did not begin in the backward pass."""
        left_out = 0
        for home in self.homes:
            arrived = [member for member in home.members if member.arrived]
            is_finite = self._gathering.is_finite(arrived)
            left_out += not is_finite
            if home.began_with is not None and home.began_with != list(map(_setting, home.members)):
                raise InputError(
                    f"the settings of '{home.unit.name}' changed between backward and step, and without clip_norm its"
                    " update has begun; change them before the backward pass"
                )
            if is_finite and arrived and home.began_with is None:
                if home in on_gpu:
                    on_gpu[home](1.0)
                else:
                    home.update(self._factors(home, 1.0), self._staging)
        self.num_skipped += left_out > 0

    def forget(self) -> None:
        """Leaves no gradient behind for the next step."""
        self._is_forward = True
        self._gathering.forget()
        for home in self.homes:
            home.began_with = None
        for visitor in self._visitors.values():
            visitor.cancel()
        self._room.begin()
        for member in self.members.values():
            member.arrived = 0

    def _factors(self, home: Home, scale: float) -> dict[Member, Scalars]:
        """Returns the factors of the coming update of each parameter that has a gradient."""
        known: dict[tuple[int, int], Scalars] = {}
        found = {}
        for member in home.members:
            key = id(member.group), member.step
            if member.arrived:
                if key not in known:
                    known[key] = scalars_of(member.step + 1, *_setting(member), scale)
                found[member] = known[key]
        return found

    # --- placement

    def settle(self) -> None:
        """Decides where the state goes, lets the gradients of host-held units leave, and allocates all of it."""
        self._gathering.take()
        sizes = [size_of(home) for home in self.homes]
        limits = self.meter.limits(self.rules.clip_norm is not None, self.rules.gpu_units)
        forwards = self.meter.forwards
        begin = max((forward.peak_bytes for forward in forwards[:2]), default=0)
        self.plan = choose_placement(sizes, self.meter.stretches, limits, begin)
        self._free_bytes = forward_room(sizes, self.plan, forwards)
        self._leaving_bytes = leaving_room(sizes, self.plan, self.meter.stretches, limits.keeps_gradients)
        if self.rules.speculates and self.rules.clip_norm is not None and self.device.type != "cuda":
            self.plan = with_spares(self.plan, sizes, [True] * len(sizes), limits.host_bytes)
        places = list(zip(self.homes, self.plan.places, self.plan.is_spare, strict=True))
        with pinning_progress(self.plan.host_bytes) as progress:
            for home, place, has_spare in sorted(places, key=lambda item: item[1] == "gpu"):
                if place == "gpu":
                    self._gathering.wait()
                if place == "visit":
                    self._visitors[home.index] = Visitor(home, self._room, progress)
                elif home.place is None:
                    home.settle(place, has_spare=has_spare, progress=progress)
                elif has_spare:
                    home.add_spare(progress)
                if home.is_on_host:
                    for member, gradient in gradients_of(home.members).items():
                        self._gather(home, member, gradient)
                    self._gathering.take()
            self._staging = Staging(self.homes, self.lanes, progress)

    def tune(self) -> None:
        """Adds spare copies where steps go unclipped and the forward pass turns out too short for the host."""
        if self.device.type != "cuda" or self.rules.clip_norm is None or not self.rules.speculates or self.plan is None:
            return
        if self.num_calm == CALM_STEPS and not any(self.plan.is_spare):
            self._clock = ForwardClock()
        elif self.num_calm > CALM_STEPS and self._clock is not None:
            forward_s, self._clock = self._clock.seconds(), None
            sizes = [size_of(home) for home in self.homes]
            rate = self.lanes.update.busy_s / max(1, self.lanes.update.num_updated)
            host_s = [rate * size.num_parameters for size in sizes]
            wanted = wants_spares(self.plan.places, host_s, [forward_s.get(n, 0.0) for n in range(len(sizes))])
            limits = self.meter.limits(True, self.rules.gpu_units)
            before = self.plan.host_bytes
            self.plan = with_spares(self.plan, sizes, wanted, limits.host_bytes)
            self.synchronize()
            with pinning_progress(self.plan.host_bytes - before) as progress:
                for home, is_spare in zip(self.homes, self.plan.is_spare, strict=True):
                    if is_spare:
                        home.add_spare(progress)

    def refresh(self) -> None:
        """Takes over weights that were written into the model; those of blocks that are away have been."""
        for home in self.homes:
            if not home.is_windowed:
                home.refresh()

    def synchronize(self) -> None:
        """Waits until every weight is the newest, and all state is at rest."""
        for home in self.homes:
            home.wait()
        self._room.finish()
        if self.window is not None:
            self.window.clear()


def _setting(member: Member) -> tuple[float, tuple[float, float], float, float]:
    """Returns learning rate, betas, eps and weight decay of a parameter, as they are now."""
    group = member.group
    return float(group["lr"]), tuple(group["betas"]), group["eps"], group["weight_decay"]
