"""Evaluates a model on the newest weights of a running program, unit by unit on the devices that hold them.

The forward is the model's own in evaluation mode. It is cut into units again, and each unit runs on the worker that
holds most of its weights, so no device holds the whole model. Workers and training state stay as they are.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipedejavu.engine.device import CPU
from pipedejavu.profile import ModelCut, cut_model
from pipedejavu.session.eval_metrics import MetricSums
from pipedejavu.session.newest_weights import NewestWeights
from pipedejavu.source.loss_reduction import Loss, Reduction
from pipedejavu.source.user_batch import UserBatch

Value = Tensor | tuple[Tensor, ...]
"""What passes from one unit to the next."""


class WorkerPlaces:
    """The devices of the workers, all of them in this process."""

    def __init__(self, devices: Mapping[int, torch.device]):
        self.devices = devices

    def is_here(self, worker: int) -> bool:
        """Whether a worker is in this process."""
        return worker in self.devices

    def pass_on(self, value: Value | None, source: int, to: int) -> Value | None:  # noqa: ARG002
        """Returns a value of one worker for the next; None if that is in another process."""
        return value


class LoaderEvaluation:
    """Runs a model in evaluation mode on weights that workers hold."""

    def __init__(self, model: nn.Module, loss: Loss, reduction: Reduction):
        self.model, self.loss, self.reduction = model, loss, reduction
        self._cuts: dict[str, ModelCut] = {}
        """The model's units in evaluation mode, by the shapes of its inputs."""

    def add(self, batch: UserBatch, weights: NewestWeights | None, places: WorkerPlaces, sums: MetricSums) -> None:
        """Adds a batch to the sums; without weights the model's own are used, where they are."""
        with torch.no_grad(), evaluation_mode(self.model, self.loss):
            cut = self._cut(batch.inputs)
            value: Value | None = cut.flat(batch.inputs)
            before = 0
            for name, unit in cut.units:
                tensors = [*_tensors_of(name, unit)]
                worker = _worker_of(tensors, weights, before)
                if worker != before:
                    value, before = places.pass_on(value, before, worker), worker
                state = _state_of(tensors, weights, worker, places)
                if places.is_here(worker):
                    value = _run(unit, value, state, places.devices[worker])
            if places.is_here(before):
                device = places.devices[before]
                assert value is not None
                output = cut.output(value)
                targets = _moved(batch.targets, device)
                summed = self.reduction.summed(self.loss)(output, targets)
                sums.add(output, targets, float(summed), batch.size)

    def _cut(self, inputs: Any) -> ModelCut:
        form = str(pytree.tree_map_only(Tensor, lambda t: (tuple(t.shape), t.dtype), inputs))
        known = self._cuts.get(form)
        if known is None or known.method == "chain":  # a chain may have got other hooks; reading it costs nothing
            known = self._cuts[form] = cut_model(self.model, inputs)
        return known


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
            passed = places.pass_on(weights.tensors.get(full), source, worker)
            newest = passed if isinstance(passed, Tensor) else None
            if newest is not None and full in weights.buffers:
                newest = newest.clone()  # a module may count its calls, which training must not see
        if places.is_here(worker):
            assert newest is not None
            state.append((table, key, tensor, newest))
    return state


def _run(unit: nn.Module, value: Any, state: list[Any], device: torch.device) -> Any:
    """Runs a unit on a device with other tensors in the place of its own."""
    try:
        for table, key, _, newest in state:
            table[key] = newest.to(device)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return unit(_moved(value, device))
    finally:
        for table, key, tensor, _ in state:
            table[key] = tensor


def _moved(value: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


@contextmanager
def evaluation_mode(*parts: object) -> Iterator[None]:
    """Puts modules into evaluation mode; restores the mode of each of their parts on exit."""
    modules = [part for part in parts if isinstance(part, nn.Module)]
    before = [(inner, inner.training) for module in modules for inner in module.modules()]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


def device_of_model(model: nn.Module) -> torch.device:
    """Returns the device of a model's first parameter."""
    return next((parameter.device for parameter in model.parameters()), CPU)
