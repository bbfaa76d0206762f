"""The first steps of a model, guarded: if the GPU's memory runs out, they are repeated with a smaller plan.

Nothing is updated before `step`, so a forward or backward pass can be repeated: gradients are dropped, generators and
buffers are set back. The forward of the whole model is wrapped to notice a shortage there. A backward pass belongs to
the user's loop, where it could not be repeated; so if memory is tight, it is first rehearsed within the forward.

    model(batch)      forward, rehearsal of the backward pass, forward again: a shortage leads to a smaller plan
    loss.backward()   needs what its rehearsal needed
"""

import functools
import gc
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipedejavu.hybrid.step_scheduler import StepScheduler
from pipedejavu.runtime.device_memory import DeviceMemory

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class MemoryShortage:
    """An allocation that the GPU refused."""

    requested_bytes: int
    allocated_bytes: int
    is_in_backward: bool

    @classmethod
    def of(cls, error: torch.OutOfMemoryError, memory: DeviceMemory, *, is_in_backward: bool) -> "MemoryShortage":
        """Returns the shortage that torch reports; call it while the frames of the error hold their tensors."""
        asked = re.search(r"allocate ([\d.]+) (bytes|KiB|MiB|GiB)", str(error))
        requested = int(float(asked[1]) * _UNITS[asked[2]]) if asked else 0
        return cls(requested, memory.allocated_bytes(), is_in_backward)

    @property
    def needed_bytes(self) -> int:
        """The memory that would have been in use after the allocation."""
        return self.requested_bytes + self.allocated_bytes


class MemoryGuard:
    """Wraps the forward of a model, and runs closures."""

    def __init__(
        self, model: nn.Module, scheduler: Callable[[], StepScheduler], shrink: Callable[[MemoryShortage], None]
    ):
        """Wraps the model's forward until `release`.

        Args:
            model: the whole model.
            scheduler: returns the present scheduler of its steps.
            shrink: makes the plan smaller; raises InputError if it cannot be.
        """
        self.model, self._scheduler, self._shrink = model, scheduler, shrink
        self._is_busy = self._has_output = False
        is_compiled = isinstance(model, torch._dynamo.OptimizedModule) or model._compiled_call_impl is not None
        self._wrapped = None if is_compiled else self._wrap(model)

    def _wrap(self, model: nn.Module) -> MethodType:
        override = model.__dict__.get("forward")
        plain: Callable[..., Any] = type(model).forward

        @functools.wraps(plain)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            call = functools.partial(plain, module) if override is None else override
            if module is not self.model or self._is_busy or not self._is_on():  # a copy of the model is not guarded
                self._has_output = False
                output = call(*args, **kwargs)
                self._has_output = True
                return output
            return self._busy(functools.partial(self._run_forward, functools.partial(call, *args, **kwargs)))

        model.forward = MethodType(forward, model)
        self._override = override
        return model.forward

    def release(self) -> None:
        """Restores the model's forward, unless another has been set since."""
        if self._wrapped is not None and self.model.__dict__.get("forward") is self._wrapped:
            del self.model.__dict__["forward"]
            if self._override is not None:
                self.model.forward = self._override

    def _is_on(self) -> bool:
        return torch.is_grad_enabled() and self._scheduler().is_guarded and not torch.compiler.is_compiling()

    def _busy(self, work: Callable[[], Any]) -> Any:
        self._is_busy = True
        try:
            return work()
        finally:
            self._is_busy = False

    def run(self, closure: Callable[[], Any]) -> Any:
        """Runs forward and backward pass of a step, again with a smaller plan if memory runs out; returns their result.

        After the first steps this needs `clip_norm`: without it, updates begin in the backward pass.
        """
        scheduler = self._scheduler()
        if scheduler.model_state.arrived or not (scheduler.is_guarded or scheduler.options.clip_norm is not None):
            return closure()
        start = _Start(self.model, scheduler.lanes.device)
        while True:
            try:
                return self._busy(closure)
            except torch.OutOfMemoryError as error:
                is_in_backward = self._has_output or bool(self._scheduler().model_state.arrived)
                shortage = MemoryShortage.of(error, scheduler.meter.memory, is_in_backward=is_in_backward)
            self._repeat(start, shortage, drops=True)

    def _run_forward(self, call: Callable[[], Any]) -> Any:
        """Returns the output of the model's forward."""
        scheduler = self._scheduler()
        is_first = not scheduler.model_state.arrived
        start, is_rehearsed, is_in_backward = _Start(self.model, scheduler.lanes.device), False, False
        while True:
            output = None
            try:
                output = call()
                scheduler = self._scheduler()
                reserved = None if scheduler.plan is None else scheduler.plan.reserved_bytes
                if is_rehearsed or not is_first or not scheduler.meter.is_tight(reserved):
                    return output
                is_in_backward = True
                _rehearse(output)
                is_rehearsed, shortage = True, None
            except torch.OutOfMemoryError as error:
                shortage = MemoryShortage.of(error, scheduler.meter.memory, is_in_backward=is_in_backward)
            output = None
            self._repeat(start, shortage, drops=is_first)
            is_in_backward = False

    def _repeat(self, start: "_Start", shortage: MemoryShortage | None, *, drops: bool) -> None:
        """Returns to the start of a forward pass, with a smaller plan if there was a shortage."""
        scheduler = self._scheduler()
        if drops:
            scheduler.drop()
            for parameter in scheduler.model_state.params:
                parameter.grad = None
        gc.collect()  # the frames of an error refer to each other
        if shortage is not None:
            self._shrink(shortage)
        scheduler = self._scheduler()
        if drops and scheduler.plan is None:
            scheduler.meter.begin(scheduler.unit_states)
        start.restore()


class _Start:
    """What a forward pass changes: the states of generators, and buffers."""

    def __init__(self, model: nn.Module, device: torch.device):
        self.model, self.device = model, device
        self.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self.random_state, self.rng_state = random.getstate(), torch.get_rng_state()
        self.gpu_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @torch.no_grad()
    def restore(self) -> None:
        for name, buffer in self.model.named_buffers():
            if name in self.buffers and not torch.equal(buffer, self.buffers[name]):
                buffer.copy_(self.buffers[name])
        random.setstate(self.random_state)
        torch.set_rng_state(self.rng_state)
        if self.gpu_state is not None:
            torch.cuda.set_rng_state(self.gpu_state, self.device)


def _rehearse(output: Any) -> None:
    """Runs a backward pass from the model's loss or, if its output has none, from all of its output."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    tensors = [value for value in tree_leaves(output if loss is None else loss) if isinstance(value, Tensor)]
    tensors = [tensor for tensor in tensors if tensor.requires_grad]
    if tensors:
        torch.autograd.backward(tensors, [torch.zeros_like(tensor) for tensor in tensors])
