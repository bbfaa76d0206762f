"""Checkpoints for the user's own loop: any model and any torch optimizer, including HybridAdamW.

They have the same layout as those of `train` and of the `Trainer`, so each can load what another has saved.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from pipedejavu.facts import InputError, finite_form
from pipedejavu.facts.printable import tell
from pipedejavu.hybrid import HybridAdamW
from pipedejavu.hybrid.state_dict import plain_entry
from pipedejavu.run.saved_facts import check_finite, current_gpu, random_state, saved_in, set_random_state
from pipedejavu.store import Checkpoint, CheckpointDir, CheckpointError, Saver, Tensors, is_sound


class Scheduler(Protocol):
    """A learning-rate scheduler of torch."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the scheduler's state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Loads the scheduler's state."""
        ...


class Checkpoints:
    """A folder of checkpoints, written while training goes on; it keeps the newest two and the best one."""

    def __init__(self, folder: str | Path):
        self.checkpoint_dir = CheckpointDir(folder)
        self.saver = Saver(self.checkpoint_dir, tell=tell)

    def save(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        step: int,
        samples: int = 0,
        loss: float | None = None,
        scheduler: Scheduler | None = None,
    ) -> None:
        """Copies weights, optimizer state, scheduler state and random generators, and starts writing them.

        `samples` is the loop's position in its data; `loss` decides which checkpoint is the best. Raises InputError if
        the state is not finite.
        """
        state = optimizer.state_dict()
        tensors, values = _state_of(model, optimizer, state["state"])
        bad = next((name for name, tensor in tensors.items() if not is_sound(name, tensor)), None)
        if bad is not None:
            raise InputError(f"'{bad}' is not finite in step {step}, and is not saved; go on from the last checkpoint")
        tensors |= random_state(device=current_gpu())
        facts = {
            "groups": [{k: _plain(v) for k, v in group.items() if k != "params"} for group in state["param_groups"]],
            "values": values,
            "scheduler": _plain(scheduler.state_dict()) if scheduler else None,
        }
        try:
            json.dumps(facts, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InputError(f"the optimizer or its scheduler holds more than tensors and numbers: {error}") from None
        self.saver.save(step, tensors, lambda: {"samples": samples, "loss": finite_form(loss), "facts": facts})

    def load(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        scheduler: Scheduler | None = None,
        allow_restart: bool = False,
    ) -> tuple[int, int]:
        """Loads the newest complete checkpoint; returns its step and samples, (0, 0) if the folder never had one.

        A damaged checkpoint is reported and set aside. Raises CheckpointError if one cannot be read for another reason,
        or if all are damaged and `allow_restart` is not set. Without an optimizer it loads the weights only.
        """
        self.saver.wait()
        checkpoint = self.checkpoint_dir.newest(tell, allow_restart=allow_restart)
        if checkpoint is None:
            return 0, 0
        check_finite(checkpoint, self.checkpoint_dir)
        load_weights(model, checkpoint)
        if optimizer is not None:
            optimizer.load_state_dict(_optimizer_state(model, optimizer, checkpoint))
        scheduler_state = saved_in(checkpoint).scheduler
        if scheduler is not None and scheduler_state is not None:
            scheduler.load_state_dict(scheduler_state)
        set_random_state(checkpoint, device=current_gpu())
        return checkpoint.step, checkpoint.manifest.samples

    def wait(self) -> None:
        """Waits until all saved checkpoints are on disk."""
        self.saver.wait()


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Loads a checkpoint's weights and buffers into a model; raises InputError if they belong to another model."""
    tied = _tied_names(model)
    names, state = checkpoint.manifest.tensors, {}
    for name, tensor in model.state_dict().items():
        # Imported checkpoints do not distinguish buffers from weights, and frozen parameters may be saved as buffers.
        kinds = ("weight", "buffer") if name in tied else ("buffer", "weight")
        known = next((f"{k}/{n}" for n in tied.get(name, (name,)) for k in kinds if f"{k}/{n}" in names), None)
        if known is None and name in tied:
            raise InputError(f"{checkpoint.path} has no weight '{name}'; it is of another model")
        loaded = tensor if known is None else checkpoint.tensor(known)
        if loaded.shape != tensor.shape:
            raise InputError(
                f"'{name}' is {tuple(loaded.shape)} in the checkpoint and {tuple(tensor.shape)} in the model"
            )
        state[name] = loaded
    model.load_state_dict(state)


def _tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Returns, for each name of a parameter, all names of that parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: same for same in names.values() for name in same}


def _numbered(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[int, str]]:
    """Yields each parameter's number in the optimizer's state and its name in the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        if id(parameter) not in names:
            raise InputError(f"parameter {number} of the optimizer is not the model's; give the model that is trained")
        yield number, names[id(parameter)]


def _state_of(
    model: nn.Module, optimizer: Optimizer, state: Mapping[int, Mapping[str, Any]]
) -> tuple[Tensors, dict[str, dict[str, Any]]]:
    """Returns all tensors under their names on disk, and the values of the state that are not tensors."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    unique = {name for name, _ in model.named_parameters()}
    tensors: Tensors = {}
    values: dict[str, dict[str, Any]] = {}
    for name, tensor in model.state_dict().items():
        if name not in parameters or name in unique:
            tensors[f"{'weight' if name in unique else 'buffer'}/{name}"] = _copy(tensor)
    for number, name in _numbered(model, optimizer):
        for slot, value in state.get(number, {}).items():
            if isinstance(value, Tensor):
                tensors[f"state/{slot}/{name}"] = _copy(value)
            elif value is not None:
                values.setdefault(name, {})[slot] = value
    return tensors, values


def _optimizer_state(model: nn.Module, optimizer: Optimizer, checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns a checkpoint's optimizer state in the form of `optimizer.state_dict()`."""
    facts, state = saved_in(checkpoint), {}
    slots: dict[str, dict[str, str]] = {}
    for full in checkpoint.names("state/"):
        _, slot, name = full.split("/", 2)
        slots.setdefault(name, {})[slot] = full
    tied = _tied_names(model)
    for number, name in _numbered(model, optimizer):
        known = next((n for n in tied[name] if n in slots), name)
        slot_values: dict[str, Any] = {slot: checkpoint.tensor(full) for slot, full in slots.get(known, {}).items()}
        slot_values |= facts.values.get(known, {})
        if slot_values:
            state[number] = slot_values if isinstance(optimizer, HybridAdamW) else plain_entry(slot_values)
    groups = optimizer.state_dict()["param_groups"]
    saved = ({},) * len(groups) if facts.groups is None else facts.groups
    if len(saved) != len(groups):
        raise CheckpointError(
            f"{checkpoint.path} has {len(saved)} groups of parameters, and the optimizer {len(groups)}"
        )
    return {"state": state, "param_groups": [{**group, **loaded} for group, loaded in zip(groups, saved, strict=True)]}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _plain(value: Any) -> Any:
    """Returns a setting in a form that JSON can hold."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, Mapping):
        return {key: _plain(inside) for key, inside in value.items()}
    return [_plain(inside) for inside in value] if isinstance(value, list | tuple) else value
