"""Checkpoints of a user's own loop: any model and any optimizer of torch, HybridAdamW too, in the layout of all others.

What `train` or a `Trainer` has saved loads into such a loop, and the other way round.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from pipedejavu.facts import InputError, finite_form
from pipedejavu.facts.printable import tell
from pipedejavu.run.saved_facts import check_finite, current_gpu, random_state, saved_in, set_random_state
from pipedejavu.store import Checkpoint, CheckpointDir, CheckpointError, Saver, Tensors, is_sound


class Scheduler(Protocol):
    """What torch's schedulers of learning rates have in common."""

    def state_dict(self) -> dict[str, Any]:
        """Returns its state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Takes its state."""
        ...


class Checkpoints:
    """The checkpoints in a folder; they are written beside training, and the newest two and the best one stay."""

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
        """Copies weights, optimizer state, the scheduler's state and torch's generators, and begins to write them.

        `samples` is where the loop is in its data, `loss` decides which checkpoint is the best. Raises InputError for a
        state that is not finite.
        """
        kept = optimizer.state_dict()
        tensors, values = _state_of(model, optimizer, kept["state"])
        bad = next((name for name, tensor in tensors.items() if not is_sound(name, tensor)), None)
        if bad is not None:
            raise InputError(f"'{bad}' is not finite in step {step}, and is not saved; go on from the last checkpoint")
        tensors |= random_state(device=current_gpu())
        facts = {
            "groups": [{k: _plain(v) for k, v in group.items() if k != "params"} for group in kept["param_groups"]],
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
        """Takes up the newest checkpoint that is whole; returns its step and samples, (0, 0) if there never was one.

        A damaged one is named and set aside; CheckpointError is raised if one cannot be read for another reason, or if
        none is left, unless `allow_restart` lets the loop begin at step 0. Without an optimizer only weights are taken.
        """
        self.saver.wait()
        found = self.checkpoint_dir.newest(tell, allow_restart=allow_restart)
        if found is None:
            return 0, 0
        check_finite(found, self.checkpoint_dir)
        load_weights(model, found)
        if optimizer is not None:
            optimizer.load_state_dict(_optimizer_state(model, optimizer, found))
        known = saved_in(found).scheduler
        if scheduler is not None and known is not None:
            scheduler.load_state_dict(known)
        set_random_state(found, device=current_gpu())
        return found.step, found.manifest.samples

    def wait(self) -> None:
        """Waits until what was saved is on the disk."""
        self.saver.wait()


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Puts a checkpoint's weights and buffers into a model; raises InputError where they are another model's."""
    tied = _tied_names(model)
    names, found = checkpoint.manifest.tensors, {}
    for name, tensor in model.state_dict().items():
        # What comes from others does not tell buffers from weights, and frozen parameters are no weights of a run.
        kinds = ("weight", "buffer") if name in tied else ("buffer", "weight")
        known = next((f"{k}/{n}" for n in tied.get(name, (name,)) for k in kinds if f"{k}/{n}" in names), None)
        if known is None and name in tied:
            raise InputError(f"{checkpoint.path} has no weight '{name}'; it is of another model")
        loaded = tensor if known is None else checkpoint.tensor(known)
        if loaded.shape != tensor.shape:
            raise InputError(
                f"'{name}' is {tuple(loaded.shape)} in the checkpoint and {tuple(tensor.shape)} in the model"
            )
        found[name] = loaded
    model.load_state_dict(found)


def _tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Returns for each name of a parameter all names of it."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: same for same in names.values() for name in same}


def _numbered(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[int, str]]:
    """Yields the number that an optimizer's state has for each of its parameters, and the parameter's name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        if id(parameter) not in names:
            raise InputError(f"parameter {number} of the optimizer is not the model's; give the model that is trained")
        yield number, names[id(parameter)]


def _state_of(
    model: nn.Module, optimizer: Optimizer, state: Mapping[int, Mapping[str, Any]]
) -> tuple[Tensors, dict[str, dict[str, Any]]]:
    """Returns all tensors under their names on disk, and what of the state is no tensor."""
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
    """Returns a checkpoint's state as an optimizer's own `state_dict` would be."""
    facts, state = saved_in(checkpoint), {}
    slots: dict[str, dict[str, str]] = {}
    for full in checkpoint.names("state/"):
        _, slot, name = full.split("/", 2)
        slots.setdefault(name, {})[slot] = full
    tied = _tied_names(model)
    for number, name in _numbered(model, optimizer):
        known = next((n for n in tied[name] if n in slots), name)
        found: dict[str, Any] = {slot: checkpoint.tensor(full) for slot, full in slots.get(known, {}).items()}
        found |= facts.values.get(known, {})
        if found:
            state[number] = found
    own = optimizer.state_dict()["param_groups"]
    saved = ({},) * len(own) if facts.groups is None else facts.groups
    if len(saved) != len(own):
        raise CheckpointError(f"{checkpoint.path} has {len(saved)} groups of parameters, and the optimizer {len(own)}")
    return {"state": state, "param_groups": [{**mine, **group} for mine, group in zip(own, saved, strict=True)]}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _plain(value: Any) -> Any:
    """Returns a setting as JSON can hold it."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, Mapping):
        return {key: _plain(inside) for key, inside in value.items()}
    return [_plain(inside) for inside in value] if isinstance(value, list | tuple) else value
