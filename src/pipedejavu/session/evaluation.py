"""Runs a model on the newest weights of a running program, unit by unit on the workers that hold them.

The units are those of the model in evaluation mode. Each runs on the worker that holds most of its weights, so no
device holds the whole model. Workers and training state stay as they are.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pipedejavu.engine.device import CPU
from pipedejavu.engine.handlers import Handlers
from pipedejavu.engine.recompute_span import tensors_of
from pipedejavu.profile import ModelCut
from pipedejavu.profile.unit_step import moved
from pipedejavu.session.newest_weights import NewestWeights

Value = Tensor | tuple[Tensor, ...]
"""What passes from one unit to the next."""


class WorkerPlaces:
    """The devices of the workers, all of them in this process."""

    def __init__(self, devices: Mapping[int, torch.device]):
        self.devices = devices

    def is_here(self, worker: int) -> bool:
        """Whether a worker is in this process."""
        return worker in self.devices

    def pass_on(self, value: Value | None, source: int, to: int, form: tuple[object, ...]) -> Value | None:  # noqa: ARG002
        """Returns a value of one worker for another; None if that is in another process.

        `form` determines the shapes of the value.
        """
        return value

    def run(self, worker: int, name: str, unit: nn.Module, value: Any) -> Any:  # noqa: ARG002
        """Runs a unit on the device of a worker of this process."""
        device = self.devices[worker]
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return unit(moved(value, device))

    def finish(self) -> None:
        """Waits until all values have arrived."""


class RankPlaces(WorkerPlaces):
    """The device of this rank's worker; the other workers are other ranks."""

    def __init__(self, handlers: Handlers):
        super().__init__({handlers.index: handlers.device})
        self.handlers = handlers

    def pass_on(self, value: Value | None, source: int, to: int, form: tuple[object, ...]) -> Value | None:
        """Sends a value from one worker to another; all ranks call it, and only these two exchange something."""
        if source == to:
            return value
        wire, key = self.handlers.wire, ("evaluation", *form)
        if self.handlers.index == source:
            assert value is not None
            wire.send(tuple(tensor.detach().contiguous() for tensor in tensors_of(value)), to, key)
        if self.handlers.index != to:
            return None
        tensors = wire.receive(source, key)
        return tensors if len(tensors) > 1 else tensors[0]

    def run(self, worker: int, name: str, unit: nn.Module, value: Any) -> Any:
        """Runs a unit, and lets the watchdog know."""
        self.handlers.notice("compute", f"the evaluation of unit '{name}'")
        output = super().run(worker, name, unit, value)
        self.handlers.notice("compute", "")
        return output

    def finish(self) -> None:
        """Waits until all values that this rank has sent have arrived."""
        self.handlers.wire.flush()


def run_model(
    cut: ModelCut, read: Callable[[], Any], form: object, weights: NewestWeights | None, places: WorkerPlaces
) -> tuple[Any, int]:
    """Returns the model's output and the worker that has it; the output is None if that is in another process.

    The model is in evaluation mode; all processes call this together. `read` returns its inputs, in the process of the
    first unit, and `form` determines their shapes. Without weights the model's own are used, on the first worker.
    """
    value: Value | None = None
    worker = 0
    for number, (name, unit) in enumerate(cut.units):
        tensors = [*_tensors_of(name, unit)]
        before, worker = worker, _worker_of(tensors, weights, worker)
        if number and worker != before:
            value = places.pass_on(value, before, worker, (name, form))
        elif not number and places.is_here(worker):
            value = cut.flat(read())
        state = _state_of(tensors, weights, worker, places)
        if places.is_here(worker):
            value = _run(name, unit, value, state, worker, places)
    return (None if value is None or not places.is_here(worker) else cut.output(value)), worker


_Slot = tuple[str, dict[str, Any], str, Tensor]
"""A tensor of a unit: its full name, the module's dictionary, the key in it, and the tensor."""


def _tensors_of(name: str, unit: nn.Module) -> Iterator[_Slot]:
    for path, part in unit.named_modules(prefix=name, remove_duplicate=False):
        for table in (part._parameters, part._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    yield ".".join(filter(None, (path, key))), table, key, tensor


def _worker_of(tensors: list[_Slot], weights: NewestWeights | None, default: int) -> int:
    """Returns the worker that holds most bytes of a unit's weights; ties go to the lowest number."""
    if weights is None:
        return default
    held = Counter[int]()
    for full, _, _, tensor in tensors:
        if full in weights.worker_of:
            held[weights.worker_of[full]] += tensor.nbytes
    return min(held, key=lambda worker: (-held[worker], worker)) if held else default


def _state_of(
    tensors: list[_Slot], weights: NewestWeights | None, worker: int, places: WorkerPlaces
) -> list[tuple[dict[str, Any], str, Tensor, Tensor]]:
    """Returns the newest value of each tensor of a unit; all processes call it together."""
    state = []
    for full, table, key, tensor in tensors:
        newest: Tensor | None = tensor
        if weights is not None and (source := weights.worker_of.get(full)) is not None:
            passed = places.pass_on(weights.tensors.get(full), source, worker, (full,))
            newest = passed if isinstance(passed, Tensor) else None
            if newest is not None and full in weights.buffers:
                newest = newest.clone()  # a module may count its calls, which training must not see
        if places.is_here(worker):
            assert newest is not None
            state.append((table, key, tensor, newest))
    return state


def _run(name: str, unit: nn.Module, value: Any, state: list[Any], worker: int, places: WorkerPlaces) -> Any:
    """Runs a unit with other tensors in the place of its own."""
    try:
        for table, key, _, newest in state:
            table[key] = newest.to(places.devices[worker])
        return places.run(worker, name, unit, value)
    finally:
        for table, key, tensor, _ in state:
            table[key] = tensor


def device_of_model(model: nn.Module) -> torch.device:
    """Returns the device of a model's first parameter."""
    return next((parameter.device for parameter in model.parameters()), CPU)
