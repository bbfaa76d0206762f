"""Tasks by name: a model with its loss, target count and data."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipedejavu.facts import InputError, nearest
from pipedejavu.zoo import bert, gpt, graph_net, moe, resnet, seq2seq, vgg
from pipedejavu.zoo.chain import Chain
from pipedejavu.zoo.data import Dataset, open_data
from pipedejavu.zoo.form import Form, GraphForm, TokenForm
from pipedejavu.zoo.graph_sample import GraphSamples
from pipedejavu.zoo.loss import balanced_cross_entropy, count, cross_entropy
from pipedejavu.zoo.mlp import Mlp, MlpSize
from pipedejavu.zoo.transformer import TransformerSize


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its loss and its data."""

    name: str
    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    """Takes the model's output and the targets; returns a sum, to be divided once by the whole batch's count."""
    count: Callable[[Any], int]
    """Takes targets; returns how many the loss sums over: `len` if each sample has one target."""
    data: Dataset
    held_out: Dataset | None = None
    """Samples to evaluate on."""


_MODELS: dict[str, tuple[type[Chain], Any]] = {
    "mlp": (Mlp, MlpSize()),
    **{name: (vgg.Vgg, size) for name, size in vgg.SIZES.items()},
    **{name: (resnet.Resnet, size) for name, size in resnet.SIZES.items()},
    **{name: (gpt.Gpt, size) for name, size in gpt.SIZES.items()},
    **{name: (bert.Bert, size) for name, size in bert.SIZES.items()},
    **{name: (seq2seq.Seq2seq, size) for name, size in seq2seq.SIZES.items()},
    **{name: (moe.Moe, size) for name, size in moe.SIZES.items()},
    **{name: (graph_net.GraphNet, size) for name, size in graph_net.SIZES.items()},
}

MODEL_NAMES = tuple(_MODELS)


def build(
    name: str,
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
    data: str | Dataset | None = None,
    **options: object,
) -> Task:
    """Builds the task that the command line calls zoo:NAME; `options` change the model's size.

    On the meta device the model has no memory. Without `data` the task uses data that every installation has: text for
    models of tokens, random arrays for others.
    """
    make, size = _sized(name, options)
    form = size.form()
    has_tokens = isinstance(form, TokenForm)
    loss = partial(balanced_cross_entropy, coefficient=size.balance) if make is moe.Moe else cross_entropy
    made: Any = make
    if data is None or isinstance(data, str):
        data = open_data(data or _default_data(form), form, seed=seed)
    if isinstance(data, GraphSamples):
        size = size.replace(features=data.features, classes=data.classes)
    return Task(
        name=name,
        model=made(size, seed=seed, device=device),
        loss=loss,
        count=count if has_tokens else len,
        data=data,
    )


def form_of(name: str, **options: object) -> Form:
    """Returns the form of the data that a model of the zoo reads; `options` as in `build`."""
    form: Form = _sized(name, options)[1].form()
    return form


def separates_documents(name: str) -> bool:
    """Whether a model of the zoo attends within each of several documents in a row."""
    return isinstance(size := _sized(name, {})[1], TransformerSize) and size.separates


def is_graph_model(name: str) -> bool:
    """Whether a model is a graph network of the zoo."""
    return name in graph_net.SIZES


def default_data(name: str) -> str:
    """Returns the default data of a model of the zoo."""
    return _default_data(form_of(name))


def _sized(name: str, options: Mapping[str, object]) -> tuple[type[Chain], Any]:
    """Returns the class and the size of a model; options are read as on a command line, with all faults at once."""
    if name not in _MODELS:
        raise InputError(f"there is no model 'zoo:{name}'{nearest(name, _MODELS)}")
    make, base = _MODELS[name]
    size = type(base).from_json(json.dumps({**base.model_dump(), **options}, default=repr), f"zoo:{name}")
    return make, size


def _default_data(form: Form) -> str:
    if isinstance(form, GraphForm):
        return "graph:power:100000"
    return "stdlib" if isinstance(form, TokenForm) else "random"
