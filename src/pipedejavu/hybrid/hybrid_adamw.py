"""HybridAdamW: AdamW whose state lies in GPU and host memory together; the training loop stays as it is.

Gradients of host-held units leave while the backward pass goes on. With `clip_norm`, the update waits for the norm of
all gradients and runs in forward order while the next forward pass is under way, each unit's forward waiting for its
own weights alone; without, it runs as soon as a unit's gradients are final. Which unit lies where changes no bit.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipedejavu.facts import InputError
from pipedejavu.hybrid.activation_choice import Activations, set_activations
from pipedejavu.hybrid.budget import Budget, MemoryMeter
from pipedejavu.hybrid.lanes import HybridLanes
from pipedejavu.hybrid.native import HostUpdate
from pipedejavu.hybrid.placement import Placement
from pipedejavu.hybrid.recorder import Recorder
from pipedejavu.hybrid.state_dict import fill_state, read_state
from pipedejavu.hybrid.step_scheduler import StepScheduler
from pipedejavu.hybrid.unit_state import size_of
from pipedejavu.hybrid.update_rules import UpdateRules
from pipedejavu.hybrid.window import open_window


class HybridAdamW(Optimizer):
    """AdamW with decoupled weight decay, float32 moments and float32 masters of bf16 weights, placed by budget.

    Where the state goes is decided at the first `step`, when the memory of a whole step has been seen; `plan` says
    what was decided and why. Gradients are consumed by `step`, as by `zero_grad`. Weights that are read outside the
    modules' own forward need `synchronize` first.
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
        speculate: bool = True,
        microbatches: int = 1,
        host_threads: int | None = None,
    ):
        """Takes a model, and its parameters in groups where they differ.

        Args:
            model: its modules tell when weights are needed.
            params: parameters or groups as every torch optimizer takes them; all of the model's by default. Those that
                are frozen now stay so; what comes later is given to `add_param_group`.
            lr: may be changed between steps, as schedulers do.
            betas: the decay of both moments.
            eps: added to the root of the second moment.
            weight_decay: decoupled from the gradient.
            clip_norm: gradients are scaled down to this norm over all parameters, exactly.
            gpu_budget: bytes that weights, state, gradients and activations may take of the GPU.
            host_budget: bytes that state may take of host memory.
            gpu_units: how many of the first units have their state on the GPU, in place of what the budgets say.
            window: how many blocks have their weights on the GPU at a time; the others' rest in host memory and come
                when they are needed. None for all, "auto" for all where they fit.
            device: where the model computes; its own device by default. A model that is larger than the GPU is built
                on the CPU, and its blocks come through the window.
            activations: what each block keeps for its backward, for all alike or by the block's name: "keep" for
                what the model itself keeps, "recompute" for its input alone, "offload" for host memory.
            speculate: whether updates are guessed during the backward pass where spare memory allows it.
            microbatches: backward passes between steps; updates that do not wait for the norm begin in the last.
            host_threads: of the host's update; all cores but two by default.
        """
        parameters = [p for p in model.parameters() if p.requires_grad] if params is None else params
        self._scheduler: StepScheduler | None = None
        _check_factors(clip_norm, microbatches, window)
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.device = _check_parameters(self.param_groups, device)
        self._budgets = gpu_budget, host_budget
        meter = MemoryMeter(self.device, *self._budgets)
        self._lanes = HybridLanes(self.device, HostUpdate(host_threads))
        rules = UpdateRules(clip_norm=clip_norm, microbatches=microbatches, speculates=speculate, gpu_units=gpu_units)
        self._make = partial(self._make_scheduler, model, rules, window, activations)
        try:
            self._scheduler = self._make(meter)
        except BaseException:
            self._lanes.close()
            raise
        self._loaded: dict[Tensor, dict[str, Any]] = {}

    def _make_scheduler(
        self,
        model: nn.Module,
        rules: UpdateRules,
        window: int | Literal["auto"] | None,
        activations: Activations | Mapping[str, Activations],
        meter: MemoryMeter,
    ) -> StepScheduler:
        """Returns the scheduler, hooked into the model; where it is refused, the model stays as it was."""
        scheduler = StepScheduler(model, self.param_groups, self._lanes, meter, rules)
        scheduler.window = open_window(model, scheduler.unit_states, self._lanes, meter, window)
        meter.check(
            [size_of(unit_state) for unit_state in scheduler.unit_states], rules.clip_norm is not None, rules.gpu_units
        )
        scheduler.undo += set_activations(
            [unit_state.unit for unit_state in scheduler.unit_states], activations, self._lanes
        )
        if scheduler.window is None:
            model.to(self.device)
        else:
            scheduler.hooks += scheduler.window.fill(model, scheduler.enter)
            scheduler.undo.append(scheduler.window.release)
        scheduler.begin()
        scheduler.hooks += [
            model.register_state_dict_pre_hook(lambda *_: self.synchronize()),  # type: ignore[no-untyped-call]
            model.register_load_state_dict_pre_hook(lambda *_: self.synchronize()),  # type: ignore[no-untyped-call]
            model.register_load_state_dict_post_hook(lambda *_: scheduler.refresh()),  # type: ignore[no-untyped-call]
        ]
        return scheduler

    @property
    def scheduler(self) -> StepScheduler:
        """The units with their state, and the work of each step."""
        assert self._scheduler is not None
        return self._scheduler

    @property
    def plan(self) -> Placement | None:
        """Where the state of each unit rests, the forecast and the reasons; None before the first step."""
        return self.scheduler.plan

    @property
    def num_skipped(self) -> int:
        """Steps that were left out, in whole or in part, because gradients were not finite."""
        return self.scheduler.num_skipped

    @property
    def norm(self) -> float:
        """The norm of all gradients of the last step before clipping, where `clip_norm` is given."""
        return self.scheduler.norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Applies the gradients that have come since the last step.

        With `clip_norm` all of them or, if their norm is not finite, none; without, each unit whose own are finite.
        """
        if closure is not None:
            raise InputError("HybridAdamW takes no closure: run forward and backward yourself, then call step()")
        scheduler = self.scheduler
        if any(p.grad is not None for group in self.param_groups for p in group["params"] if p not in scheduler.params):
            raise InputError(
                "a parameter that was frozen when HybridAdamW was made has a gradient; leave it out of the groups then,"
                " and give it to add_param_group when it is trained"
            )
        scheduler.drop_with_model()
        if not any(param.arrived for param in scheduler.params.values()):
            return
        if scheduler.plan is None:
            scheduler.settle()
            self._fill()
        scheduler.apply()
        scheduler.tune()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What GradScaler.step asks an optimizer first."""
        raise InputError(
            "GradScaler scales a loss that HybridAdamW has taken the gradients of by the time they would be unscaled;"
            " leave the scaler out and use bfloat16, which needs none"
        )

    def synchronize(self) -> None:
        """Waits until every weight is the newest, and all state is at rest."""
        self.scheduler.synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients that no step has taken; a step has taken its own already."""
        self.scheduler.drop()
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in the layout of torch.optim.AdamW, with the low half of each split master beside it."""
        self.synchronize()
        self.state.clear()
        self.state.update(self._loaded)
        read_state(self.scheduler.unit_states, self.state)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of a HybridAdamW or of a torch.optim.AdamW, for weights that are loaded beside it."""
        self.synchronize()
        saved = [len(group["params"]) for group in state_dict["param_groups"]]
        own = [len(group["params"]) for group in self.param_groups]
        if saved != own:
            raise InputError(f"the state is of groups of {saved} parameters, and this optimizer's are of {own}")
        for key in ("amsgrad", "maximize"):
            if any(group.get(key) for group in state_dict["param_groups"]):
                raise InputError(f"the state is of an AdamW with {key}=True, which HybridAdamW does not have")
        order = [p for group in self.param_groups for p in group["params"]]
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        states = state_dict["state"]
        self._loaded = {p: states[n] for p, n in zip(order, numbers, strict=True) if n in states}
        for group, found in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in found.items() if key != "params"})
        for parameter, param in self.scheduler.params.items():
            if param.step and parameter not in self._loaded:
                fill_state(param, None)
        self._fill()

    def _fill(self) -> None:
        """Moves loaded state to where it rests, as far as that is decided, and weights to the copies on the host."""
        for parameter, param in self.scheduler.params.items():
            if param.state is not None and parameter in self._loaded:
                fill_state(param, self._loaded.pop(parameter))
        self.scheduler.refresh()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters of the model, between steps; the next step places everything anew.

        What was on the GPU waits on the host until then, and what was on the host is there twice for a moment.
        """
        if self._scheduler is None:
            super().add_param_group(param_group)
            return
        if any(param.arrived for param in self.scheduler.params.values()):
            raise InputError("add_param_group came between backward and step; call it after step()")
        super().add_param_group(param_group)
        skipped, self._loaded = self.num_skipped, self._at_rest()
        try:
            _check_parameters(self.param_groups[-1:], self.device)
            self._scheduler = self._make(MemoryMeter(self.device, *self._budgets))
        except InputError:
            self.param_groups.pop()
            self._scheduler = self._make(MemoryMeter(self.device, *self._budgets))
            raise
        finally:
            self.scheduler.num_skipped = skipped
            self._fill()

    def _at_rest(self) -> dict[Tensor, dict[str, Any]]:
        """Returns all state in host memory, and leaves the model free."""
        self.state_dict()
        state = {p: {name: value.cpu() for name, value in found.items()} for p, found in self.state.items()}
        self.state.clear()
        self._release()
        return state

    def record(self) -> Recorder:
        """Begins to record when the actions of the lanes run; its `finish` returns them."""
        recorder = Recorder(self.device)
        recorder.watch(self.scheduler.unit_states[-1].unit.module, self.scheduler.unit_states[-1].index)
        self._lanes.listen(recorder)
        recorder.undo.append(partial(self._lanes.listen, None))
        return recorder

    def close(self) -> None:
        """Waits for all work and ends the threads; the model is free, and the optimizer cannot be used again."""
        self.synchronize()
        self._release()
        self._lanes.close()

    def _release(self) -> None:
        for hook in self.scheduler.hooks:
            hook.remove()
        for undo in self.scheduler.undo:
            undo()


def _check_factors(clip_norm: float | None, microbatches: int, window: object) -> None:
    if clip_norm is not None and not clip_norm > 0:
        raise InputError(f"clip_norm is {clip_norm}; give a number above 0, or None for no clipping")
    if microbatches < 1:
        raise InputError(f"microbatches is {microbatches}; give the number of backward passes of a step, 1 or more")
    if window not in (None, "auto") and not (isinstance(window, int) and window >= 1):
        raise InputError(f"window is {window!r}; give the number of blocks on the GPU, 'auto', or None for all")


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
