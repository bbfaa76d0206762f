"""The state of the worker of one GPU and its host, in the form in which the engine's workers show theirs.

Weights rest in the modules of the units, and optimizer state in HybridAdamW. `settle` waits for both and shows them
under the engine's names; `adopt` takes over what was written there.
"""

import weakref
from typing import Literal

import torch

from pipedejavu.engine.device import CPU, device_of
from pipedejavu.engine.engine_state import SLOTS
from pipedejavu.engine.handlers import Handlers, Runners
from pipedejavu.engine.job import Batches, Job
from pipedejavu.engine.master import weights_of
from pipedejavu.engine.optimizer import LOW as LOW_HALF
from pipedejavu.engine.optimizer import Tensors
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.threads import put_lows
from pipedejavu.engine.wire import Exchange, ThreadWire
from pipedejavu.facts import Device
from pipedejavu.hybrid.activation_choice import Activations
from pipedejavu.hybrid.assignment import AssignedPlace, Assignment
from pipedejavu.hybrid.hybrid_adamw import HybridAdamW
from pipedejavu.hybrid.lanes import HybridLanes
from pipedejavu.hybrid.state_dict import LOW, read_state
from pipedejavu.one_device.unit_chain import move_shared, without_later_hooks
from pipedejavu.one_device.unit_settings import UnitSettings
from pipedejavu.program import Program, Value
from pipedejavu.program.effect import rest_of
from pipedejavu.runtime.compute_precision import ComputeFormat, lower_
from pipedejavu.runtime.deferred_logits import HeadUse
from pipedejavu.runtime.device_memory import DeviceMemory
from pipedejavu.runtime.lane import ThreadLane

_SLOTS = {slot: name for slot, name in SLOTS.items() if slot != "momentum"} | {LOW_HALF: LOW}
"""The engine's names of optimizer state, and those in the state dict of HybridAdamW."""


class DeviceHandlers(Handlers):
    """The units, the optimizer and the log of the only worker."""

    def __init__(self, program: Program, job: Job, batches: Batches):
        """Trains the modules of the job's units themselves; their weights must rest on one device.

        Weights that are computed with as bf16 become the high halves of their masters.
        """
        device = device_of(program, 0)
        self.form = ComputeFormat.of(program.plan.precision, [module for _, module in job.units])
        """How the units compute."""
        self.settings = UnitSettings(job)
        compiler = job.compiler_for(program)
        runners: Runners = {
            (number, 0): PieceRunner(
                [(unit, *job.units[unit]) for unit in piece.units], job.seed, compiler=compiler, form=self.form
            )
            for number, piece in enumerate(program.pieces)
        }
        lows = _lower(runners, self.form)
        move_shared(job.units, device)
        if program.plan.order.head_chunks > 1:
            runners[len(program.pieces) - 1, 0].head = HeadUse(program.plan.order.head_chunks)
        self.plain = {n: without_later_hooks(module) for n, (_, module) in enumerate(job.units)}
        """The units without the hooks of the optimizer."""
        self.optimizer = _make_optimizer(program, job, self.settings, self.form, device)
        super().__init__(program, 0, runners, job, batches, ThreadWire(Exchange({}), 0))
        self._form = self.form  # that of the units before their weights were lowered
        self.load_device = CPU  # the optimizer copies what is loaded to where it rests
        weakref.finalize(self, _abandon, self.optimizer.scheduler.lanes).atexit = False
        for key, halves in lows.items():
            put_lows(self, key, halves)
        self.adopt()
        self.settle()

    def begin(self, update: int) -> None:
        """Prepares a round that starts at an update."""
        self.first_microbatch, self.first_version = update * self.program.update_size, update

    def settle(self) -> None:
        """Waits for all updates, and shows the weights in `values` and the optimizer state in `applier`."""
        self.optimizer.synchronize()
        self.values.clear()
        for key, runner in self.runners.items():
            weights = {name: parameter.detach() for name, parameter in runner.parameters().items()}
            self.values[Value.weights(*key, 0)] = weights
        if self.optimizer.plan is not None:
            self._show_state()

    def _show_state(self) -> None:
        entries: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for parameter, param in self.optimizer.scheduler.model_state.params.items():
            if param.state is not None and param.state.low is not None:  # also before its first update
                entries[parameter] = {LOW: param.state.low.view(parameter.shape)}
        read_state(self.optimizer.scheduler.unit_states, entries)
        for key, runner in self.runners.items():
            self.applier.state[key] = {
                name: {slot: entries[p][known] for slot, known in _SLOTS.items() if known in entries[p]}
                for name, p in runner.parameters().items()
                if p in entries
            }

    def adopt(self) -> None:
        """Trains on from the weights and the optimizer state that were put down."""
        entries: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for key, runner in self.runners.items():
            state = self.applier.state.get(key, {})
            for name, parameter in runner.parameters().items():
                slots = state.get(name, {})
                if ("step" in slots or LOW_HALF in slots) and parameter not in entries:
                    entries[parameter] = {_SLOTS[slot]: tensor for slot, tensor in slots.items()}
        self.optimizer.put_state(entries)
        self.drop_loaded()

    def drop_loaded(self) -> None:
        """Frees optimizer state that was put down, once the optimizer has copied it: not before its first step."""
        if self.optimizer.plan is not None:
            self.applier.state.clear()

    def close(self) -> None:
        """Waits for all work, removes the hooks from the units and ends the threads."""
        self.optimizer.close()


def _lower(runners: Runners, form: ComputeFormat) -> dict[tuple[int, int], Tensors]:
    """Makes weights bf16 that are computed with as such; returns the low halves of all split masters, by piece.

    Parameters stay the same objects, which tied units share. Of their masters, the runners keep only the form.
    """
    weights: dict[torch.Tensor, torch.Tensor] = {}
    lows: dict[tuple[int, int], Tensors] = {}
    for key, runner in runners.items():
        lows[key] = {}
        for name, parameter in runner.parameters().items():
            if form.is_split and parameter.dtype == torch.bfloat16:
                lows[key][name] = torch.zeros(parameter.shape, dtype=torch.int16)
            if name in runner.lowered:
                halves = weights_of({name: parameter.detach()}, {name}, is_split=True)
                weights[parameter], lows[key][name] = halves[0][name], halves[1][name]
                runner.initial[name] = torch.empty_like(parameter.detach(), device="meta")
    for parameter, weight in weights.items():
        parameter.data = weight
    for runner in runners.values():
        for _, _, module in runner.units:
            lower_(module, form)  # frozen weights
    return lows


def _abandon(lanes: HybridLanes) -> None:
    """Ends the threads of lanes that nothing uses any more, without waiting for them."""
    for lane in lanes.all:
        if isinstance(lane, ThreadLane):
            lane.abandon()


def _gpu_budget(planned: Device, device: torch.device) -> int | Literal["auto"]:
    """Returns the bytes of the GPU that the plan counts on, or what this process may take if that is less."""
    if device.type != "cuda":
        return "auto"
    size_bytes = max(1, int(planned.memory_bytes - planned.reserved_bytes))
    return size_bytes if size_bytes < DeviceMemory(device).limit_bytes() else "auto"


def _make_optimizer(
    program: Program, job: Job, settings: UnitSettings, form: ComputeFormat, device: torch.device
) -> HybridAdamW:
    """Hooks HybridAdamW into the units, with the places of the plan."""
    plan, units = program.plan, [*job.units]
    places: list[AssignedPlace] = ["gpu"] * len(units)
    for number, piece in enumerate(program.pieces):
        rest = rest_of(program, number)
        for unit in piece.units:
            places[unit] = "gpu" if rest == "device" else rest
    # The chain recomputes compiled units itself.
    recomputed = set[int]() if plan.is_compiled else {unit for some in program.recomputed for unit in some}
    others: Activations = "offload" if plan.keep.activations == "host" else "keep"
    clip_norm = job.clip_norm if plan.reduce.clip == "global" else None
    if clip_norm is None and (plan.reduce.clip == "global" or "visit" in places):
        clip_norm = torch.inf  # updates wait for the norm of all gradients
    return HybridAdamW(
        torch.nn.ModuleList({id(module): module for _, module in units}.values()),
        settings.groups,
        clip_norm=clip_norm,
        gpu_budget=_gpu_budget(program.machine.device(program.devices[0]), device),
        device=device,
        activations={name: "recompute" if n in recomputed else others for n, (name, _) in enumerate(units)},
        head_chunks=1,  # the chain divides the head as the plan says
        microbatches=program.update_size,
        moments=plan.precision.moments,
        assignment=Assignment(
            units=units,
            places=places,
            visitors=plan.keep.visitors,
            window=plan.keep.num_windowed + plan.order.prefetch,
            sums_wide=form.sums_wide,
        ),
    )
