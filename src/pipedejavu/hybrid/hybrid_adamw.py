"""HybridAdamW: AdamW with its state in GPU and host memory, inside an unchanged training loop.

Gradients of units whose state is on the host leave during the backward pass. With `clip_norm`, updates wait for the
norm of all gradients and overlap with the next forward pass, in which each unit waits only for its own weights.
Without it, a unit is updated as soon as its gradients are final. The placement of units changes no bit.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipedejavu.facts import InputError
from pipedejavu.hybrid.activation_choice import Activations
from pipedejavu.hybrid.assignment import Assignment
from pipedejavu.hybrid.budget import Budget, MemoryMeter
from pipedejavu.hybrid.head_choice import HeadChunks
from pipedejavu.hybrid.lanes import HybridLanes
from pipedejavu.hybrid.memory_guard import MemoryGuard, MemoryShortage
from pipedejavu.hybrid.placement import Placement
from pipedejavu.hybrid.recorder import Recorder
from pipedejavu.hybrid.smaller_plan import describe_shortage, refusal_of, shrink_plan
from pipedejavu.hybrid.state_dict import fill_state, read_state
from pipedejavu.hybrid.step_options import StepOptions
from pipedejavu.hybrid.step_scheduler import StepScheduler
from pipedejavu.optim.moment_format import MOMENT_FORMATS, MomentFormat
from pipedejavu.optim.native import HostUpdate
from pipedejavu.runtime.device_memory import use_expandable_segments
from pipedejavu.runtime.host_pages import end_warming
from pipedejavu.runtime.socket_home import bound_to, home_of_device

_log = logging.getLogger("pipedejavu")


class HybridAdamW(Optimizer):
    """AdamW with decoupled weight decay and float32 masters of bf16 weights, on a GPU and its host.

    The first `step` decides where the state of each unit rests, from the measured memory of a whole step and the
    budgets; `plan` has the decision and its reasons. `step` consumes the gradients. Call `synchronize` before weights
    are read other than by the forward of their module.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None = None,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        clip_norm: float | None = None,
        gpu_budget: Budget = "auto",
        host_budget: Budget = "auto",
        gpu_units: int | None = None,
        window: int | Literal["auto"] | None = "auto",
        device: torch.device | str | None = None,
        activations: Activations | Mapping[str, Activations] = "keep",
        head_chunks: HeadChunks = "auto",
        speculate: bool = True,
        microbatches: int = 1,
        moments: MomentFormat = "fp32",
        host_threads: int | None = None,
        assignment: Assignment | None = None,
    ):
        """Hooks the optimizer into a model.

        Args:
            model: the model that is trained; forwards of its modules wait for their weights.
            params: parameters or parameter groups, as for every torch optimizer; by default all of the model's.
                Parameters that are frozen now stay frozen; use `add_param_group` for later ones.
            lr: learning rate; may be changed between steps, as schedulers do.
            betas: decay of the two moments.
            eps: added to the root of the second moment.
            weight_decay: decoupled from the gradient.
            clip_norm: limit of the norm of all gradients, as of `clip_grad_norm_`; None for no clipping.
            gpu_budget: bytes of GPU memory that torch may reserve in this process, for weights, state, gradients,
                activations and fragmentation; its allocator is held to them until `close`. By default all that is free,
                within the process's memory fraction.
            host_budget: bytes of host memory for state; by default most of what is free within the limits of cgroups
                and of the process.
            gpu_units: puts the state of this many units, the first ones, on the GPU instead of as many as fit.
            window: how many blocks have their weights on the GPU at a time; the weights of the others rest in host
                memory until they are needed. None for all blocks; "auto" for all if they fit.
            device: where the model computes; by default where it is. Build a model that is larger than the GPU on the
                CPU; its blocks then come through the window.
            activations: what blocks keep for their backward, for all blocks or by block name: "keep" what the model
                saves itself, "recompute" from the arguments, or "offload" to host memory. A linear layer before the
                loss may be "chunk".
            head_chunks: chunks of tokens in which the last linear layer and the cross-entropy of its result run, so
                that the logits of all tokens never exist together; 1 for all at once. "auto" divides them if more state
                then fits the GPU's budget.
            speculate: whether updates may run speculatively during the backward pass, if host memory allows.
            microbatches: backward passes per step; updates that do not wait for the norm begin in the last one.
            moments: the format in which both moments rest: "fp32" (8 bytes per parameter), "bf16" (4), or "int8" (2,
                and 8 per 256 values). Updates compute with float32 in all of them.
            host_threads: threads of the host's update; by default all cores but two.
            assignment: the units of the model with the place of each, as a plan gives them; `gpu_units` and `window`
                then have no effect, and the budgets limit only streamed and shadow state.
        """
        if not isinstance(model, nn.Module):
            raise InputError(
                "HybridAdamW takes the model, whose forward it hooks to bring weights in time, and is given a"
                f" {type(model).__name__}; write HybridAdamW(model, lr=...), or HybridAdamW(model, params, lr=...) for"
                " groups or some of its parameters"
            )
        parameters = [p for p in model.parameters() if p.requires_grad] if params is None else params
        self._scheduler: StepScheduler | None = None
        _check_factors(clip_norm, microbatches, window)
        _check_chunks(head_chunks)
        _check_moments(moments)
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.device = _check_parameters(self.param_groups, device)
        self._budgets = gpu_budget, host_budget
        if self.device.type == "cuda":
            use_expandable_segments()
        meter = MemoryMeter(self.device, *self._budgets)
        with bound_to(home_of_device(self.device)):  # threads of the update stay on the GPU's socket, and its memory
            update = HostUpdate(host_threads)
        self._lanes = HybridLanes(self.device, update)
        self._model = model
        self._options = StepOptions(
            clip_norm=clip_norm, microbatches=microbatches, speculates=speculate, gpu_units=gpu_units,
            window=window, activations=activations, head_chunks=head_chunks, moments=moments, assignment=assignment,
        )  # fmt: skip
        try:
            self._scheduler = self._schedule(meter)
        except BaseException:
            end_warming()
            self._lanes.close()
            raise
        meter.memory.release()
        self._uncap = meter.cap()
        self.shortages: list[str] = []
        """What was said of steps that ran out of GPU memory and were repeated with a smaller plan."""
        self._guard = MemoryGuard(model, lambda: self.scheduler, self._shrink)
        self._loaded: dict[Tensor, dict[str, Any]] = {}

    def _schedule(self, meter: MemoryMeter) -> StepScheduler:
        return StepScheduler(self._model, self.param_groups, self._lanes, meter, self._options)

    @property
    def scheduler(self) -> StepScheduler:
        """Runs the steps; holds the state of all units."""
        assert self._scheduler is not None
        return self._scheduler

    @property
    def plan(self) -> Placement | None:
        """Where the state of each unit rests, the predicted memory and the reasons; None before the first step."""
        return self.scheduler.plan

    @property
    def num_skipped(self) -> int:
        """Steps that were left out, in whole or in part, because gradients were not finite."""
        return self.scheduler.updates.num_skipped

    @property
    def norm(self) -> float:
        """The norm of all gradients of the last step before clipping, if `clip_norm` is given."""
        return self.scheduler.updates.norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Applies the gradients since the last step.

        With `clip_norm`, nothing is applied if the norm of all gradients is not finite. Without it, units whose own
        gradients are not finite are left out.

        A `closure` runs forward and backward pass and returns the loss, which `step` returns. It is called again with a
        smaller plan if the GPU's memory runs out in it.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = self._guard.run(closure)
        self._apply()
        return result

    def _apply(self) -> None:
        scheduler, params = self.scheduler, self.scheduler.model_state.params
        if any(p.grad is not None for group in self.param_groups for p in group["params"] if p not in params):
            raise InputError(
                "a parameter that was frozen when HybridAdamW was made has a gradient; leave it out of the groups then,"
                " and give it to add_param_group when it is trained"
            )
        scheduler.drop_with_model()
        if not scheduler.model_state.arrived:
            return
        if scheduler.plan is None:
            scheduler.settle()
            self._fill_state()  # weights are there, and may have had an update already
        scheduler.apply()
        scheduler.tune()

    def _shrink(self, shortage: MemoryShortage) -> None:
        """Takes the next smaller plan after a shortage; raises InputError if there is none."""
        try:
            done = shrink_plan(self.scheduler, is_in_backward=shortage.is_in_backward) or self._open_window()
        except torch.OutOfMemoryError:  # a smaller plan needs some memory before it frees more
            done = None
        if done is None:
            raise refusal_of(shortage, self.scheduler.meter.budget_bytes())
        self.shortages.append(describe_shortage(shortage, done))
        _log.warning(self.shortages[-1])

    def _open_window(self) -> str | None:
        """Lets blocks rest on the host if nothing has been placed yet and the user left it to the optimizer."""
        scheduler = self.scheduler
        num_blocks = sum(unit_state.unit.is_block for unit_state in scheduler.unit_states)
        is_placed = any(unit_state.place is not None for unit_state in scheduler.unit_states)
        if scheduler.model_state.arrived or is_placed or self._options.window != "auto" or num_blocks < 3:
            return None
        self._options = replace(scheduler.options, window=2)
        scheduler.release()
        meter = scheduler.meter
        self._scheduler = self._schedule(meter)
        return "at most 2 blocks have their weights on the GPU"

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuses GradScaler, whose `step` reads this attribute first."""
        raise InputError(
            "GradScaler scales a loss that HybridAdamW has taken the gradients of by the time they would be unscaled;"
            " leave the scaler out and use bfloat16, which needs none"
        )

    def synchronize(self) -> None:
        """Waits until every weight is up to date and all state is at rest."""
        self.scheduler.synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients that no step has consumed."""
        self.scheduler.drop()
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in the layout of torch.optim.AdamW, plus the low half of each split master.

        Moments are in the format in which they rest; those of int8 are codes and scales under names of their own.
        """
        self.synchronize()
        self.state.clear()
        self.state.update(self._loaded)
        read_state(self.scheduler.unit_states, self.state)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of a HybridAdamW or a torch.optim.AdamW; the weights are loaded separately."""
        self.synchronize()
        saved = [len(group["params"]) for group in state_dict["param_groups"]]
        present = [len(group["params"]) for group in self.param_groups]
        if saved != present:
            raise InputError(f"the state is of groups of {saved} parameters, and this optimizer's are of {present}")
        for key in ("amsgrad", "maximize"):
            if any(group.get(key) for group in state_dict["param_groups"]):
                raise InputError(f"the state is of an AdamW with {key}=True, which HybridAdamW does not have")
        order = [p for group in self.param_groups for p in group["params"]]
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        states = state_dict["state"]
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})
        self.put_state({p: states[n] for p, n in zip(order, numbers, strict=True) if n in states})

    def put_state(self, states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Replaces the state by entries in the layout of torch.optim.AdamW; others are as before a first update.

        Takes over weights that were written into the model, too.
        """
        self.synchronize()
        self._loaded = dict(states)
        for parameter, param in self.scheduler.model_state.params.items():
            if param.step and parameter not in self._loaded:
                fill_state(param, None)
        self._fill()

    def _fill(self) -> None:
        """Copies loaded state to where it rests, and the weights to their copies on the host."""
        self._fill_state()
        self.scheduler.model_state.refresh()

    def _fill_state(self) -> None:
        """Copies loaded state to where it rests, of units for which that is decided."""
        for parameter, param in self.scheduler.model_state.params.items():
            if param.state is not None and parameter in self._loaded:
                fill_state(param, self._loaded.pop(parameter))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters of the model between steps; the next step decides the placement again.

        Until then all state is on the host; for a moment, state that was there exists twice.
        """
        if self._scheduler is None:
            super().add_param_group(param_group)
            return
        if self.scheduler.model_state.arrived:
            raise InputError("add_param_group came between backward and step; call it after step()")
        super().add_param_group(param_group)
        skipped, self._loaded = self.num_skipped, self._at_rest()
        try:
            _check_parameters(self.param_groups[-1:], self.device)
            self._scheduler = self._schedule(MemoryMeter(self.device, *self._budgets))
        except InputError:
            self.param_groups.pop()
            self._scheduler = self._schedule(MemoryMeter(self.device, *self._budgets))
            raise
        finally:
            self.scheduler.updates.num_skipped = skipped
            self._fill()

    def _at_rest(self) -> dict[Tensor, dict[str, Any]]:
        """Returns all state in host memory, and removes the hooks from the model."""
        self.state_dict()
        state = {p: {name: value.cpu() for name, value in values.items()} for p, values in self.state.items()}
        self.state.clear()
        self.scheduler.release()
        return state

    def record(self) -> Recorder:
        """Starts recording when the actions of the lanes run; `finish` of the recorder returns them."""
        recorder = Recorder(self.device)
        recorder.watch(self.scheduler.unit_states[-1].unit.module, self.scheduler.unit_states[-1].index)
        self._lanes.listen(recorder)
        recorder.undo.append(partial(self._lanes.listen, None))
        return recorder

    def close(self) -> None:
        """Waits for all work, removes the hooks and ends the threads; the optimizer cannot be used again."""
        self.synchronize()
        self._guard.release()
        self.scheduler.release()
        self._lanes.close()
        self._uncap()


def _check_factors(clip_norm: float | None, microbatches: int, window: object) -> None:
    if clip_norm is not None and not clip_norm > 0:
        raise InputError(f"clip_norm is {clip_norm}; give a number above 0, or None for no clipping")
    if microbatches < 1:
        raise InputError(f"microbatches is {microbatches}; give the number of backward passes of a step, 1 or more")
    if window not in (None, "auto") and not (isinstance(window, int) and window >= 1):
        raise InputError(f"window is {window!r}; give the number of blocks on the GPU, 'auto', or None for all")


def _check_chunks(chunks: object) -> None:
    if chunks != "auto" and not (isinstance(chunks, int) and chunks >= 1):
        raise InputError(f"head_chunks is {chunks!r}; give 1 or more chunks of tokens, or 'auto'")


def _check_moments(moments: object) -> None:
    if moments not in MOMENT_FORMATS:
        raise InputError(f"moments is {moments!r}; give 'fp32', 'bf16' or 'int8'")


def _check_parameters(groups: list[dict[str, Any]], device: torch.device | str | None) -> torch.device:
    """Returns the device that the model computes on."""
    parameters = [p for group in groups for p in group["params"] if p.requires_grad]
    devices = {p.device for p in parameters}
    if not parameters:
        raise InputError("no parameter requires a gradient; call requires_grad_() on what is to be trained")
    if len(devices) != 1:
        raise InputError(f"the parameters are on {len(devices)} devices ({devices}); move the model to one")
    for parameter in parameters:
        if parameter.dtype not in (torch.bfloat16, torch.float32):
            raise InputError(f"a parameter is {parameter.dtype}; HybridAdamW trains bfloat16 and float32")
        if not parameter.is_contiguous():
            raise InputError(f"a parameter of shape {tuple(parameter.shape)} is not contiguous; call .contiguous()")
    return torch.empty(0, device=device or devices.pop()).device  # with its number
