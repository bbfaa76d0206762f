"""Opens a model as a task: a zoo model, a Hugging Face configuration, or a function in a user's file."""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from pipedejavu.data.data_choice import DataChoice
from pipedejavu.data.data_source import open_choice, open_held_out, take_part
from pipedejavu.facts import InputError, nearest
from pipedejavu.graph_data import parse_fanouts
from pipedejavu.run.options import TrainOptions
from pipedejavu.source.hf_model import build_hf_model, check_data
from pipedejavu.source.hub import check_source
from pipedejavu.source.initial_weights import load_weights
from pipedejavu.source.loss_reduction import NUM_SAMPLES, find_reduction, own_loss
from pipedejavu.source.rng import seed_all
from pipedejavu.source.trained_part import TrainedPart, freeze_rest
from pipedejavu.source.user_batch import UserBatch, inputs_and_targets
from pipedejavu.zoo import Dataset, Task, build, default_data, form_of, is_graph_model, separates_documents


def open_task(
    model: str,
    *,
    seed: int = 0,
    data: str | DataChoice | None = None,
    weights: str | None = None,
    device: str | None = None,
    context: int | None = None,
    part: TrainedPart = TrainedPart(),  # noqa: B008
) -> Task:
    """Builds the task of a model's name: 'hf:CONFIG', 'FILE.py:FUNCTION', or the name of a zoo model.

    `weights` is a file or folder to load weights from; by default they are random, from the seed. On the device 'meta'
    the model takes no memory. `context` is the sequence length. Only `part` of the model is trained.
    """
    choice = data if isinstance(data, DataChoice) else DataChoice(name=data)
    choice = choice if context is None else choice.replace(context=context)
    if choice.fanout is not None and not is_graph_model(model):
        raise InputError(f"--fanout is for graph networks such as zoo:sage, and '{model}' is none; leave it out")
    if model.startswith("hf:"):
        name = model.removeprefix("hf:")
        task = build_hf_model(name, seed=seed, choice=choice, weights=weights, device=device)
        freeze_rest(task.model, part, seed)
        return task
    if part.lora is not None:
        raise InputError(f"--lora is for hf: models, and '{model}' is none; name what to train with --train")
    task = _open(model, seed, choice, device)
    if weights is not None:
        load_weights(task.model, weights)
    freeze_rest(task.model, part, seed)
    return task


def check_sources(options: TrainOptions) -> None:
    """Raises InputError if the weights of a new run can be seen not to be there, or lack data to be trained on."""
    model, weights = options.model, options.weights
    if model.startswith("hf:"):
        check_data(model.removeprefix("hf:"), options.data, weights)
    if weights is None:
        return
    if model.startswith("hf:"):
        check_source(weights, "weights")
    elif not Path(weights).exists():
        raise InputError(f"cannot read {weights}: there is no such file or folder")


def _open(model: str, seed: int, choice: DataChoice, device: str | None) -> Task:
    path, colon, function = model.rpartition(":")
    if colon and path.endswith(".py"):
        if choice.name is not None:
            raise InputError(f"{model} brings its own data, but --data asks for '{choice.name}'; leave --data out")
        if choice.evaluation is not None:
            raise InputError(f"{model} brings its own data; hold a share of it out with --eval, not --eval-data")
        if choice.context is not None:
            raise InputError(f"--context is for hf: and zoo: models; '{model}' brings sequences of its own length")
        seed_all(seed)
        with torch.device(device or torch.get_default_device()):
            task = _task(model, _load(path, function)())
        rest = take_part(task.data, choice.replace(part="eval"), seed) if choice.held_out else None
        return replace(task, data=take_part(task.data, choice, seed), held_out=rest)
    size: dict[str, object] = {} if choice.context is None else {"context": choice.context}
    if choice.fanout is not None:
        size["fanouts"] = parse_fanouts(choice.fanout)
    form, default = form_of(model, **size), default_data(model)
    separates = partial(separates_documents, model)
    dataset = open_choice(choice, form, default=default, seed=seed, separates=separates)
    task = build(model, seed=seed, data=dataset, device=device, **size)
    return replace(task, held_out=open_held_out(choice, form, default=default, seed=seed, separates=separates))


def _load(path: str, function: str) -> Callable[[], Any]:
    """Imports a user's file and returns a function of it; the file can import modules from its own folder."""
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
    target = getattr(module, function, None)
    if not callable(target):
        known = [name for name, member in vars(module).items() if callable(member) and not name.startswith("_")]
        raise InputError(f"{path} has no function '{function}'{nearest(function, known)}")
    factory: Callable[[], Any] = target
    return factory


def _task(name: str, made: Any) -> Task:
    """Returns the task for the (model, loss, samples) that a user's function returned."""
    if not isinstance(made, tuple) or len(made) != 3 or not isinstance(made[0], nn.Module):
        raise InputError(
            f"{name} returned a {type(made).__name__}; return (model, loss, samples): a module, a function of its"
            " output and the targets that returns a mean or a sum over samples, or None for the model's own loss, and a"
            " dataset of (inputs, targets)"
        )
    model, loss, samples = made
    data, loss = _Samples(samples, has_own_loss=loss is None), loss or own_loss
    if any(parameter.is_meta for parameter in model.parameters()):  # only estimated, without values
        return Task(name=name, model=model, loss=loss, count=len, data=data)
    first = UserBatch.of(data.batch([n % len(data) for n in range(NUM_SAMPLES)]))
    reduction, _ = find_reduction(model, loss, [first])
    count = len if reduction.counts_samples else reduction.count
    return Task(name=name, model=model, loss=reduction.summed(loss), count=count, data=data)


class _Samples(Dataset):
    """Batches of any samples of a user's dataset, which follows torch.utils.data."""

    def __init__(self, samples: Any, *, has_own_loss: bool):
        self.samples, self.has_own_loss = samples, has_own_loss

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices: Tensor | Sequence[int]) -> tuple[Any, Any]:
        """Stacks samples into a batch and returns (inputs, targets)."""
        items = [self.samples[int(n)] for n in indices]
        return inputs_and_targets(_stacked(items), has_own_loss=self.has_own_loss)


def _stacked(items: Sequence[Any]) -> Any:
    """Returns samples as one batch: keeps tuples, lists and dicts, and stacks the tensors in them."""
    flat = [pytree.tree_flatten(dict(item) if isinstance(item, Mapping) else item) for item in items]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise InputError(
            "the samples of the dataset do not all hold the same tuples, lists and dicts; give all one form"
        )
    try:
        columns = [default_collate([*column]) for column in zip(*(leaves for leaves, _ in flat), strict=True)]
    except (RuntimeError, TypeError) as error:
        text = str(error).partition("\n")[0]
        raise InputError(
            f"the samples of the dataset cannot be stacked: {text}; give tensors or numbers, each of one shape in all"
            " samples, alone or in tuples, lists and dicts"
        ) from None
    return pytree.tree_unflatten(columns, spec)
