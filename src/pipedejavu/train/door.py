"""The one door for models: by name, from a configuration, or out of a user's own file, all as tasks."""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from pipedejavu.facts import InputError, nearest
from pipedejavu.train.begin import load_weights
from pipedejavu.train.hugging import build_hugging
from pipedejavu.zoo import Dataset, Task, build


def open_task(
    model: str,
    *,
    seed: int = 0,
    data: str | None = None,
    weights: str | None = None,
    device: str | None = None,
    context: int | None = None,
) -> Task:
    """Builds the task that a model's name stands for: 'hf:CONFIG', 'FILE.py:FUNCTION', or a model of the zoo.

    It has the weights that a file or folder holds, or those that the seed makes. On the device 'meta' the model gets no
    memory. `context` is the length of a configuration's sequences.
    """
    if model.startswith("hf:"):
        name = model.removeprefix("hf:")
        return build_hugging(name, seed=seed, data=data, weights=weights, device=device, context=context)
    task = _open(model, seed, data, device, context)
    if weights is not None:
        load_weights(task.model, weights)
    return task


def _open(model: str, seed: int, data: str | None, device: str | None, context: int | None) -> Task:
    if context is not None:
        raise InputError(f"--context is for hf: models; '{model}' brings sequences of its own length")
    path, colon, function = model.rpartition(":")
    if colon and path.endswith(".py"):
        if data is not None:
            raise InputError(f"{model} brings its own data, but --data asks for '{data}'; leave --data out")
        torch.manual_seed(seed)
        with torch.device(device or torch.get_default_device()):
            return _task(model, _load(path, function)())
    return build(model, seed=seed, data=data, device=device)


def _load(path: str, function: str) -> Callable[[], Any]:
    """Runs a user's file and returns a function of it; modules beside the file can be imported as when it is run."""
    file = Path(path).resolve()
    if not file.is_file():
        raise InputError(f"cannot read {path}: there is no such file")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        known = [name for name, member in vars(module).items() if callable(member) and not name.startswith("_")]
        raise InputError(f"{path} has no function '{function}'{nearest(function, known)}")
    made: Callable[[], Any] = found
    return made


def _task(name: str, made: Any) -> Task:
    """Returns a task of what a user's function made: (model, loss, samples)."""
    if not isinstance(made, tuple) or len(made) != 3 or not isinstance(made[0], nn.Module):
        raise InputError(
            f"{name} returned a {type(made).__name__}; return (model, loss, samples): a module, a function of its"
            " output and the targets that returns a sum over samples, or None for the model's own loss, and a dataset"
            " of (inputs, targets)"
        )
    model, loss, samples = made
    return Task(name=name, model=model, loss=loss or own_loss, count=len, data=_Samples(samples))


class _Samples(Dataset):
    """A user's dataset, as torch.utils.data has them, by batches of any samples."""

    def __init__(self, samples: Any):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices: Tensor | Sequence[int]) -> tuple[Any, Any]:
        """Stacks samples; those that have one form only are what the model needs for its own loss."""
        found = default_collate([self.samples[int(n)] for n in indices])
        return inputs_and_targets(tuple(found) if isinstance(found, list) else found)


def inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """Returns both parts of a batch; a mapping is all keyword arguments of a model that has its own loss."""
    if isinstance(batch, Mapping):
        tensors = [value for value in batch.values() if isinstance(value, Tensor)]
        return batch, batch["labels"] if "labels" in batch else tensors[0]
    if not isinstance(batch, tuple) or len(batch) != 2:
        raise InputError("a batch is (inputs, targets), or a mapping of arguments for a model that has its own loss")
    return batch


def own_loss(output: Any, targets: Any) -> Tensor:
    """Returns the loss that a model itself computes, a mean over samples, as a sum over them."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    found = found[0] if isinstance(found, tuple) else found
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise InputError(
            "the model computes no loss of its own: its output is no number and has none called 'loss'; give a loss, or"
            " give the model its labels"
        )
    return found.reshape(()) * len(targets)
