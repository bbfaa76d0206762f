"""Data sets by name; only MNIST and CIFAR-10 are ever downloaded, and only if their files are missing.

A name may have a detail after a colon: the folder of 'mnist' and 'cifar10' (by default data/NAME), or the number of
samples of 'random'.
"""

import re
from pathlib import Path

from pipedejavu.facts import InputError, nearest
from pipedejavu.graph_data import graph_cache
from pipedejavu.graph_data.csr_graph import ARRAYS, MANIFEST
from pipedejavu.zoo.dataset import Dataset, order
from pipedejavu.zoo.form import Form, GraphForm, ImageForm, TokenForm
from pipedejavu.zoo.graph_sample import open_graph_data
from pipedejavu.zoo.image import Split, cifar10_files, mnist_files, read_cifar10, read_digits, read_mnist
from pipedejavu.zoo.noise import RandomImages, RandomTokens
from pipedejavu.zoo.sequence import Sequences
from pipedejavu.zoo.text import Text, read_stdlib

__all__ = ["DATA_NAMES", "Dataset", "open_data", "order"]

_IMAGES = ("digits", "mnist", "cifar10")
DATA_NAMES = (*_IMAGES, "stdlib", "random", "graph")

_DETAILS = {
    "mnist": "a folder",
    "cifar10": "a folder",
    "random": "a number of samples",
    "graph": "power:EDGES, stdlib or a folder",
}
"""What may follow a colon."""

_NUM_RANDOM = 10_000
_NUM_BYTES = 256


def open_data(name: str, form: Form | None = None, *, seed: int = 0, split: Split = "train") -> Dataset:
    """Opens a data set in the form that a model reads, by default its own; `seed` determines random contents."""
    kind, colon, detail = name.partition(":")
    if kind not in DATA_NAMES:
        raise InputError(f"there is no data '{name}'{nearest(kind, DATA_NAMES)}")
    if split not in ("train", "test"):
        raise InputError(f"there is no split '{split}'; known: train, test")
    if colon and kind not in _DETAILS:
        raise InputError(f"data '{kind}' takes nothing after a colon, found '{name}'; leave it out")
    if colon and not detail:
        raise InputError(f"'{name}' ends with its colon; add {_DETAILS[kind]} or leave the colon out")
    if isinstance(form, GraphForm) or kind == "graph":
        return _graph(name, form, seed, split)
    if kind == "random":
        return _random(form or ImageForm(), _size(detail), seed, split)
    if kind == "stdlib":
        return _stdlib(form or TokenForm(), seed, split)
    if isinstance(form, TokenForm):
        raise InputError(f"data '{kind}' has images, but the model reads tokens; use stdlib or random")
    folder = Path(detail or f"data/{kind}")
    match kind:
        case "mnist":
            return read_mnist(folder, split, form)
        case "cifar10":
            return read_cifar10(folder, split, form)
    return read_digits(split, form)


def _graph(name: str, form: Form | None, seed: int, split: Split) -> Dataset:
    kind, _, detail = name.partition(":")
    form = form or GraphForm()
    if not isinstance(form, GraphForm) or kind != "graph":
        wanted = "a graph" if isinstance(form, GraphForm) else "images" if isinstance(form, ImageForm) else "tokens"
        raise InputError(
            f"the model reads {wanted}, and data '{name}' has none; graph networks, such as zoo:sage, take"
            " graph:power:EDGES, graph:stdlib or graph:FOLDER"
        )
    return open_graph_data(detail, form, graph_cache(), seed=seed, split=split)


def data_files(name: str) -> list[Path]:
    """Returns the files of the training split, or an empty list for data without files."""
    kind, _, detail = name.partition(":")
    folder = Path(detail or f"data/{kind}")
    match kind:
        case "mnist":
            return [*mnist_files(folder, "train")]
        case "cifar10":
            return cifar10_files(folder, "train")
        case "graph" if (folder / MANIFEST).is_file():
            return [folder / f"{name}.npy" for name in ARRAYS if name != "features"]  # which take long to hash
    return []


def _random(form: ImageForm | TokenForm, size: int, seed: int, split: Split) -> Dataset:
    if isinstance(form, ImageForm):
        return RandomImages(form, size, seed, is_test=split == "test")
    return Sequences(RandomTokens(form, size, seed, is_test=split == "test"), form, seed)


def _stdlib(form: ImageForm | TokenForm, seed: int, split: Split) -> Dataset:
    if isinstance(form, ImageForm):
        raise InputError(f"data 'stdlib' has tokens, but the model reads images; use {', '.join(_IMAGES)} or random")
    if form.num_plain < _NUM_BYTES:
        needed = _NUM_BYTES + form.vocabulary - form.num_plain
        raise InputError(f"data 'stdlib' needs a vocabulary of {needed}, found {form.vocabulary}; raise vocabulary")
    return Sequences(Text(read_stdlib(), form.context, is_test=split == "test"), form, seed)


def _size(detail: str) -> int:
    if not detail:
        return _NUM_RANDOM
    if not re.fullmatch("[1-9][0-9]{0,11}", detail):
        raise InputError(f"data 'random:SIZE' takes a number of samples, found '{detail}'")
    return int(detail)
