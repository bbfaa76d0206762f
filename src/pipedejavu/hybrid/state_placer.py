"""The placement at run time: decided after the first backward pass, and extended by shadow state later.

Owns the placement, the memory of streamed state and the limits that the forward and backward pass keep to. Knows
nothing of how updates are computed.
"""

from collections.abc import Sequence

from pipedejavu.hybrid.budget import ForwardClock, MemoryMeter, pinning_progress
from pipedejavu.hybrid.gradient_collector import GradientCollector
from pipedejavu.hybrid.head_choice import HeadChoice
from pipedejavu.hybrid.lanes import HybridLanes
from pipedejavu.hybrid.model_state import ModelState
from pipedejavu.hybrid.placement import (
    MemoryInterval,
    Placement,
    choose_placement,
    free_for_leaving,
    free_in_forward,
    wants_shadows,
    with_shadows,
)
from pipedejavu.hybrid.step_options import StepOptions
from pipedejavu.hybrid.streamed_state import StreamBuffer, StreamedState
from pipedejavu.hybrid.unit_state import ParamState, UnitState, gradients_of, size_of
from pipedejavu.hybrid.weight_staging import WeightStaging

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
        self._free_bytes: dict[int, int] = {}
        """By unit: GPU memory that streamed state may still take during its forward."""
        self._leaving_bytes: dict[int, int] = {}
        """By unit: GPU memory that gradients on their way to the host may take when its own are final."""

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
                if place == "gpu":
                    bucket.wait()
                if place == "visit":
                    self.streamed[unit_state.index] = StreamedState(unit_state, self.buffer, progress)
                elif unit_state.place is None:
                    unit_state.settle(place, has_shadow=has_shadow, progress=progress)
                elif has_shadow:
                    unit_state.add_shadow(progress)
                if unit_state.is_on_host:
                    for param, gradient in gradients_of(unit_state.params).items():
                        gradients.add(unit_state, param, gradient)
                    bucket.take()
            self.staging = WeightStaging(unit_states, self.lanes, progress)

    def _choose(self) -> Placement:
        sizes, options = self.model_state.sizes, self.options
        limits = self.meter.limits(options.clip_norm is not None, options.gpu_units)
        forwards = self.meter.forwards
        begin = max((forward.peak_bytes for forward in forwards[:2]), default=0)

        def place(intervals: Sequence[MemoryInterval]) -> Placement:
            return choose_placement(sizes, intervals, limits, begin)

        plan = self.head.settle(self.meter.intervals, forwards, place)
        self._free_bytes = free_in_forward(sizes, plan, forwards)
        self._leaving_bytes = free_for_leaving(sizes, plan, self.meter.intervals, limits.keeps_gradients)
        if options.speculates and options.clip_norm is not None and self.lanes.device.type != "cuda":
            plan = with_shadows(plan, sizes, [True] * len(sizes), limits.host_bytes)
        self.plan = plan
        return plan

    def begin_timing(self) -> None:
        """Begins to time forwards, unless there is shadow state already."""
        if self.plan is not None and not any(self.plan.has_shadow):
            self.clock = ForwardClock()

    def wants_shadow_state(self) -> list[bool]:
        """Ends the timing; returns by unit whether the forward pass is too short to hide its update on the host."""
        assert self.clock is not None
        assert self.plan is not None
        forward_s, self.clock = self.clock.seconds(), None
        sizes = self.model_state.sizes
        rate = self.lanes.update.busy_s / max(1, self.lanes.update.num_updated)
        host_s = [rate * size.num_parameters for size in sizes]
        return wants_shadows(self.plan.places, host_s, [forward_s.get(n, 0.0) for n in range(len(sizes))])

    def add_shadow_state(self, wanted: list[bool]) -> None:
        """Allocates shadow state for the wanted units as far as host memory allows; no update may be running."""
        assert self.plan is not None
        limits = self.meter.limits(True, self.options.gpu_units)
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
