"""The placement at run time: decided after the first backward pass, and extended by shadow state later.

Owns the placement, the memory of streamed state and the limits that the forward and backward pass keep to. Knows
nothing of how updates are computed.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from pipedejavu.facts import InputError, format_bytes, format_seconds
from pipedejavu.hybrid.budget import ForwardClock, MemoryMeter, pinning_progress
from pipedejavu.hybrid.deferred_moments import count_deferred, describe_deferred
from pipedejavu.hybrid.gradient_collector import GradientCollector
from pipedejavu.hybrid.head_choice import HeadChoice
from pipedejavu.hybrid.lanes import HybridLanes
from pipedejavu.hybrid.model_state import ModelState
from pipedejavu.hybrid.param_state import ParamState
from pipedejavu.hybrid.place_change import change_places
from pipedejavu.hybrid.placement import (
    Limits,
    MemoryInterval,
    Place,
    Placement,
    assigned_placement,
    choose_placement,
    estimate_placement,
    free_for_leaving,
    free_in_forward,
    gpu_peak,
    host_bytes,
)
from pipedejavu.hybrid.shadow_choice import wants_shadows, with_shadows
from pipedejavu.hybrid.step_options import StepOptions
from pipedejavu.hybrid.step_time import ASSUMED_COPY_S, StepTimes
from pipedejavu.hybrid.streamed_state import StreamBuffer, StreamedState
from pipedejavu.hybrid.unit_state import UnitState, size_of
from pipedejavu.hybrid.weight_staging import WeightStaging
from pipedejavu.runtime.host_memory import Progress
from pipedejavu.runtime.host_pages import end_warming

PAYING_SHARE = 0.02
"""The least share of a step by which other places must shorten it before state is moved."""
TIMED_STEP = 4
"""The step whose passes are timed to decide on places, and on which moments are deferred."""
RETIMED_STEPS = 256
"""Steps after which a step is timed again: another load on the host, or other batches, may ask for other places."""
UNCLIPPED_STEPS = 3
"""Consecutive unclipped steps after which speculative updates are considered."""


class StatePlacer:
    """Decides where the state of each unit rests, and allocates it."""

    def __init__(
        self, model_state: ModelState, lanes: HybridLanes, meter: MemoryMeter, options: StepOptions, head: HeadChoice
    ):
        self.model_state, self.lanes, self.meter, self.options, self.head = model_state, lanes, meter, options, head
        self.plan: Placement | None = None
        self.buffer = StreamBuffer(lanes)
        self.streamed: dict[int, StreamedState] = {}
        """By unit: state that is streamed to the GPU for its update."""
        self.staging = WeightStaging([], lanes)
        self.clock: ForwardClock | None = None
        """Times the forward of each unit during one step, before shadow state is decided on."""
        self._num_deferred = 0
        """Units on the host that defer their moments."""
        self._intervals: Sequence[MemoryInterval] = []
        """The memory of a step, by which state was placed."""
        self._free_bytes: dict[int, int] = {}
        """By unit: GPU memory that streamed state may still take during its forward."""
        self._leaving_bytes: dict[int, int] = {}
        """By unit: GPU memory that gradients on their way to the host may take when its own are final."""

    def begin(self) -> None:
        """Allocates the state that an assignment gives to the host, so that its gradients leave from the first step."""
        places = self._assigned()
        on_host = [(u, p) for u, p in zip(self.model_state.unit_states, places, strict=False) if p in ("host", "lean")]
        with pinning_progress(sum(size_of(unit_state).host_bytes for unit_state, _ in on_host)) as progress:
            for unit_state, place in on_host:
                if unit_state.place is None:
                    unit_state.settle(place, has_shadow=False, progress=progress)
            if places:
                self.staging = WeightStaging(self.model_state.unit_states, self.lanes, progress)

    def _assigned(self) -> list[Place]:
        """Returns the place of each unit that an assignment gives; an empty list if there is none."""
        assignment = self.options.assignment
        if assignment is None:
            return []
        place_of = {id(module): place for (_, module), place in zip(assignment.units, assignment.places, strict=True)}
        places = [place_of[id(unit_state.unit.module)] for unit_state in self.model_state.unit_states]
        return ["host" if place == "window" else place for place in places]

    def saw_forward(self, unit_state: UnitState) -> None:
        """Measures memory before the forward of a unit in the first step; later frees memory for it."""
        if self.plan is None:
            self.meter.saw_forward(unit_state)
        elif self.streamed:
            self.buffer.shrink(self._free_bytes.get(unit_state.index, 0))

    def saw_gradient(self, unit_state: UnitState, param: ParamState) -> None:
        """Measures memory as gradients are made in the first step."""
        if self.plan is None and param.arrived == 1:
            self.meter.saw_gradient(unit_state, 0 if unit_state.is_on_host else size_of(unit_state).gradient_bytes)

    def leaving_bytes(self, unit_state: UnitState) -> int:
        """Returns the GPU memory that leaving gradients may take when the gradients of a unit are final."""
        return self._leaving_bytes.get(unit_state.index, 0)

    def fetch_after(self, unit_state: UnitState) -> None:
        """Starts copying the streamed state that is due when the gradients of a unit are final."""
        for index in self.plan.arrivals.get(unit_state.index, ()) if self.plan is not None else ():
            self.streamed[index].fetch()

    def settle(self, gradients: GradientCollector) -> None:
        """Decides the placement, sends the gradients of units on the host there, and allocates all state."""
        bucket, unit_states = gradients.bucket, self.model_state.unit_states
        bucket.take()
        plan = self._choose()
        places = list(zip(unit_states, plan.places, plan.has_shadow, strict=True))
        with pinning_progress(plan.host_bytes) as progress:
            for unit_state, place, has_shadow in sorted(places, key=lambda item: item[1] == "gpu"):
                has_sent = unit_state.is_on_host
                if place == "gpu":
                    bucket.wait()
                self._settle(unit_state, place, has_shadow, progress)
                if not has_sent:
                    gradients.send(unit_state)
            bucket.wait()  # the plan has room for less than the first backward pass has left
            if self.options.assignment is None:
                self.staging = WeightStaging(unit_states, self.lanes, progress)
        end_warming()
        self._note_places("the GPU's or the host's memory ran out while state was allocated")

    def _settle(self, unit_state: UnitState, place: Place, has_shadow: bool, progress: Progress) -> None:
        """Allocates the state of a unit in its place; if memory runs out, in the next smaller one."""
        if unit_state.place is not None:
            if has_shadow:
                unit_state.add_shadow(progress)
            return
        try:
            self._allocate(unit_state, place, has_shadow, progress)
        except torch.OutOfMemoryError:
            self.meter.memory.release()
            self._settle(unit_state, "host", False, progress)
            unit_state.is_moved = True
        except (MemoryError, OSError) as error:  # the operating system, or the pinning of pages
            unit_state.place = None
            if place == "host" and not unit_state.is_windowed:
                self._settle(unit_state, "lean", False, progress)
                return
            size, total = size_of(unit_state).no_copy_bytes, self._host_bytes_with([unit_state])
            raise InputError(
                f"the host refused memory for the state of '{unit_state.unit.name}' ({format_bytes(size)} of"
                f" {format_bytes(total)}): {error}; raise the limit of the process, or give a larger gpu_budget"
            ) from None

    def _allocate(self, unit_state: UnitState, place: Place, has_shadow: bool, progress: Progress) -> None:
        try:
            if place == "visit":
                self.streamed[unit_state.index] = StreamedState(unit_state, self.buffer, progress)
            else:
                unit_state.settle(place, has_shadow=has_shadow, progress=progress)
        except BaseException:
            unit_state.place = None
            for param in unit_state.params:
                param.state = param.gradient = None
            raise

    def let_leave(self, gradients: GradientCollector) -> None:
        """Sends the gradients that are complete to the host in the first backward pass, if the GPU cannot hold more.

        Their state rests on the host from then on; gradients come from the last unit to the first, as the host is
        filled.
        """
        if self.plan is not None or not self.meter.wants_gradients_to_leave():
            return
        gradients.bucket.take()
        for unit_state in reversed(self.model_state.unit_states):
            is_open = unit_state.place is None and gradients.is_complete(unit_state)
            place = self._place_that_leaves_room(unit_state) if is_open else None
            if place is not None:
                with pinning_progress(size_of(unit_state).host_bytes) as progress:
                    self._settle(unit_state, place, False, progress)
                unit_state.is_moved = True
                gradients.send(unit_state)
                self.meter.saw_leave(size_of(unit_state).gradient_bytes)
        gradients.bucket.wait()

    def _place_that_leaves_room(self, unit_state: UnitState) -> Place | None:
        """Returns where the state of a unit may rest so that the host has room for all other state; None if nowhere.

        A copy of its weights is kept only if all units that may follow it to the host have room without one.
        """
        units, sizes, limit = self.model_state.unit_states, self.model_state.sizes, self.limits().host_bytes
        following: list[Place] = ["host" if unit is unit_state else unit.place or "lean" for unit in units]
        if unit_state.is_windowed or host_bytes(sizes, following) <= limit:
            return "host"
        alone: list[Place] = ["lean" if unit is unit_state else unit.place or "gpu" for unit in units]
        return "lean" if host_bytes(sizes, alone) <= limit else None

    def move_to_host(self, unit_states: list[UnitState], gradients: GradientCollector) -> bool:
        """Moves the state of units from the GPU to the host; returns False if the host has no memory for it.

        All updates have ended. Gradients that have arrived go to the host too.
        """
        if self._host_bytes_with(unit_states) > self.limits().host_bytes:
            return False
        for unit_state in unit_states:
            with pinning_progress(size_of(unit_state).host_bytes) as progress:
                unit_state.move_to_host(progress)
            self.streamed.pop(unit_state.index, None)
            gradients.send(unit_state)
        gradients.bucket.wait()
        self._note_places("the GPU's memory ran out in a step")
        return True

    def limits(self) -> Limits:
        """Returns the budgets of both memories."""
        return self.meter.limits(self.options.clip_norm is not None, self.options.gpu_units)

    def _host_bytes_with(self, moved: list[UnitState]) -> int:
        """Returns the host memory of all state if that of these units is moved there."""
        units, sizes = self.model_state.unit_states, self.model_state.sizes
        places: list[Place] = ["host" if unit in moved else unit.place or "gpu" for unit in units]
        return host_bytes(sizes, places)

    def _note_places(self, reason: str) -> None:
        """Corrects the plan if state rests elsewhere than was planned."""
        places = tuple(unit_state.place or "gpu" for unit_state in self.model_state.unit_states)
        if self.plan is None or places == self.plan.places:
            return
        count = sum(now != planned for now, planned in zip(places, self.plan.places, strict=True))
        sizes, limits = self.model_state.sizes, self.limits()
        gpu = gpu_peak(sizes, self.meter.intervals, places, limits.keeps_gradients)
        arrivals = {unit: tuple(n for n in due if n in self.streamed) for unit, due in self.plan.arrivals.items()}
        self.plan = replace(
            self.plan, places=places, arrivals=arrivals, gpu_bytes=gpu, reserved_bytes=limits.budget_for(gpu),
            host_bytes=host_bytes(sizes, places),
            reasons=(*self.plan.reasons, f"{reason}: {count} units rest in a smaller place than was planned"),
        )  # fmt: skip
        self._allow(self.plan, limits)

    def _allow(self, plan: Placement, limits: Limits) -> None:
        """Computes what streamed state and leaving gradients may take of the GPU during a step."""
        sizes = self.model_state.sizes
        self._free_bytes = free_in_forward(sizes, plan, self.meter.forwards)
        self._leaving_bytes = free_for_leaving(sizes, plan, self.meter.intervals, limits.keeps_gradients)

    def _choose(self) -> Placement:
        sizes, options = self.model_state.sizes, self.options
        self.meter.measure_fragmentation()
        limits = self.limits()
        plan = self._place(self._divide_heads(limits), limits)
        plan = replace(plan, reasons=(*plan.reasons, *self.head.reasons))
        self._allow(plan, limits)
        if options.speculates and options.clip_norm is not None and self.lanes.device.type != "cuda":
            plan = with_shadows(plan, sizes, [True] * len(sizes), limits.host_bytes)
        self.plan = plan
        return plan

    def _divide_heads(self, limits: Limits) -> Sequence[MemoryInterval]:
        """Divides heads into chunks if more state fits on the GPU then; returns the memory that a step will take."""
        intervals = self._intervals = self.meter.intervals
        self.head.end_unused()
        for name in self.head.whole:
            divided = self.head.divided(name, intervals, self.meter.forwards)
            if divided is None or not self._is_better(intervals, divided, limits):
                self.head.end(name)
                continue
            self.head.divide(name, intervals[0].peak_bytes - divided[0].peak_bytes)
            intervals = self._intervals = divided
        return intervals

    def _is_better(self, whole: Sequence[MemoryInterval], divided: Sequence[MemoryInterval], limits: Limits) -> bool:
        """Whether the second measurement leaves room for more state on the GPU, or the first leaves too little."""
        try:
            before = self._place(whole, limits)
        except InputError:
            return True
        return self._place(divided, limits).places.count("gpu") > before.places.count("gpu")

    def _place(self, intervals: Sequence[MemoryInterval], limits: Limits, times: StepTimes | None = None) -> Placement:
        """Places the state of the units, given the memory of a step and, if known, its times."""
        sizes, assignment = self.model_state.sizes, self.options.assignment
        begin = max((forward.peak_bytes for forward in self.meter.forwards[:2]), default=0)
        if assignment is not None:
            return assigned_placement(sizes, intervals, limits, self._assigned(), assignment.visitors, begin)
        return choose_placement(sizes, intervals, limits, begin, times)

    def better_plan(self, times: StepTimes) -> Placement | None:
        """Returns the placement that the times of a step choose, if it shortens the step of the plan clearly."""
        plan, sizes = self.plan, self.model_state.sizes
        is_fixed = self.options.assignment is not None or self.options.clip_norm is None
        if plan is None or is_fixed or any(plan.has_shadow):
            return None
        limits = self.limits()
        found = self._place(self._intervals, limits, times)
        before_s, after_s = (estimate_placement(each, sizes, times) for each in (plan, found))
        if found.places == plan.places or after_s > (1 - PAYING_SHARE) * before_s:
            return None
        reason = (
            f"by the measured times of passes, updates and copies, a step of {format_seconds(before_s)} becomes one of"
            f" {format_seconds(after_s)} with other places"
        )
        return replace(found, reasons=(*found.reasons, *self.head.reasons, reason))

    def change_to(self, plan: Placement) -> None:
        """Moves state to the places of another plan, with every bit; no update may be running."""
        with pinning_progress(0) as progress:
            units = self.model_state.unit_states
            change_places(
                units, [*plan.places], self.streamed, lambda unit, place: self._settle(unit, place, False, progress)
            )
            self.staging = WeightStaging(units, self.lanes, progress)
        self.plan = plan
        self._allow(plan, self.limits())
        self._note_places("memory ran out while state was moved")

    def begin_timing(self) -> None:
        """Begins to time the passes of a step."""
        self.clock = ForwardClock()

    def end_timing(self) -> StepTimes:
        """Returns what the timed step took by unit, and what the host's updates take."""
        assert self.clock is not None
        clock, self.clock = self.clock, None
        forward_s, sizes = clock.seconds(), self.model_state.sizes
        rate = self.lanes.update.busy_s / max(1, self.lanes.update.num_updated)
        return StepTimes(
            forward_s=[forward_s.get(n, 0.0) for n in range(len(sizes))],
            host_s=[rate * size.num_parameters for size in sizes],
            rest_s=clock.rest_s,
            return_s=self._copy_times("OFFLOAD"),
            fetch_s=self._copy_times("FETCH"),
        )

    def _copy_times(self, kind: str) -> list[float]:
        """Returns what copies of each unit's streamed state take, assumed if none has been copied."""
        sizes, rate = [size.streamed_bytes for size in self.model_state.sizes], self.buffer.copied[kind]
        return [rate.seconds(size) or size * ASSUMED_COPY_S for size in sizes]

    def defer_moments(self, times: StepTimes | None) -> None:
        """Lets as many units defer their moments as shortens the step; without times, all on the host."""
        on_host = [unit_state for unit_state in self.model_state.unit_states if unit_state.place == "host"]
        count = len(on_host) if times is None else count_deferred([u.index for u in on_host], times)
        for number, unit_state in enumerate(on_host):
            unit_state.defers_moments = number < count
        if self.plan is not None and count != self._num_deferred:
            self.plan = replace(self.plan, reasons=(*self.plan.reasons, describe_deferred(count)))
        self._num_deferred = count

    def add_shadow_state(self, times: StepTimes) -> None:
        """Allocates shadow state for the units whose updates the forward pass is too short to hide.

        It is added as far as host memory allows, and only once; no update may be running.
        """
        assert self.plan is not None
        if any(self.plan.has_shadow):
            return
        wanted = wants_shadows(self.plan.places, times.host_s, times.forward_s)
        limits = self.limits()
        before = self.plan.host_bytes
        self.plan = with_shadows(self.plan, self.model_state.sizes, wanted, limits.host_bytes)
        with pinning_progress(self.plan.host_bytes - before) as progress:
            for unit_state, has_shadow in zip(self.model_state.unit_states, self.plan.has_shadow, strict=True):
                if has_shadow:
                    unit_state.add_shadow(progress)

    def forget(self) -> None:
        """Cancels streamed state that was fetched and is not needed, and prepares for the next step."""
        for streamed in self.streamed.values():
            streamed.cancel()
        self.buffer.begin()
