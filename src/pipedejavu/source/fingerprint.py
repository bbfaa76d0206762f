"""Fingerprints of a run's model source and data, each with a name for use in errors.

They are cheap and reproducible: hashes of files, versions of packages, and for data from a user's file, its length and
a hash over some items. A run stores them in its checkpoints and compares them when it resumes.
"""

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import file_digest, sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pipedejavu.data.data_files import find_files
from pipedejavu.data.text_tokenizer import find_tokenizer
from pipedejavu.facts import InputError, open_file
from pipedejavu.facts.version import VERSION
from pipedejavu.run.options import TrainOptions
from pipedejavu.run.run_folder import RunStart
from pipedejavu.source.chosen_data import data_choice
from pipedejavu.source.hf_model import read_config_text, tokenizer_folder
from pipedejavu.source.model_source import open_task
from pipedejavu.zoo import Dataset, default_data
from pipedejavu.zoo.data import data_files
from pipedejavu.zoo.text import read_stdlib

NUM_ITEMS = 8
"""Items of a user's data that are hashed, evenly spaced from the first to the last."""
_SHOWN = 12
_INSTALLED = {"site-packages", "dist-packages"}
_ABSENT = "nothing"

Fingerprints = dict[str, str]


def read_fingerprints(options: TrainOptions) -> Fingerprints:
    """Returns the current fingerprints of a run's model and data."""
    path, colon, _ = options.model.rpartition(":")
    if colon and path.endswith(".py"):
        return _of_file(options, Path(path).resolve())
    if options.model.startswith("hf:"):
        name = options.model.removeprefix("hf:")
        model = {f"the configuration {name}": _hash(read_config_text(name)), "transformers": _version("transformers")}
        return model | _of_choice(options, "stdlib", tokenizer_folder(name, options.weights), is_zoo=False)
    model = {f"pipedejavu, which has zoo:{options.model}": VERSION}
    return model | _of_choice(options, default_data(options.model), None, is_zoo=True)


def fingerprints_to_save(options: TrainOptions, start: RunStart | None) -> Fingerprints:
    """Returns the fingerprints for a run's checkpoints: those of its start, or new ones; none if nothing is saved."""
    known = start.fingerprints if start else {}
    saves = options.checkpoint_every != 0 or options.init_candidates > 1
    return known or (read_fingerprints(options) if saves else {})


def describe_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns a description of each fingerprint that changed, with the old and the new value."""
    return [
        f"{name} (before {_shown(text)}, now {_shown(now.get(name, _ABSENT))})"
        for name, text in before.items()
        if now.get(name, _ABSENT) != text
    ]


def _of_file(options: TrainOptions, path: Path) -> Fingerprints:
    """Returns the fingerprints of a user's file, its local imports and its data; runs the file to find them."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    with _preserve_rng():
        torch.set_default_dtype(getattr(torch, options.parameter_dtype))
        torch.set_num_threads(1)  # so that computed data is bitwise reproducible
        try:
            data = open_task(options.model, seed=options.seed).data
            items = [_hash_items(data, options.seed) for _ in range(2)]
        finally:
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
    fingerprints = {f"the file {path.name}": _hash_file(path)}
    for module in sorted(_modules_beside(path)):
        fingerprints[f"the module {module.relative_to(path.parent).as_posix()}"] = _hash_file(module)
    fingerprints["the length of the data"] = str(len(data))
    if items[0] is not None and items[0] == items[1]:  # data that ignores the seed has no fingerprint
        fingerprints[f"{min(NUM_ITEMS, len(data))} items of the data"] = items[0]
    return fingerprints


def _modules_beside(path: Path) -> set[Path]:
    """Returns the files of imported modules in the folder of a user's file, without installed packages."""
    files = set()
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if name not in ("__main__", "__mp_main__") and isinstance(file, str):
            inside = Path(file).resolve()
            is_beside = inside.is_relative_to(path.parent) and inside != path and inside.is_file()
            if is_beside and not _INSTALLED & {*inside.parts} and name.partition(".")[0] != "pipedejavu":
                files.add(inside)
    return files


def _of_choice(options: TrainOptions, default: str, model_folder: str | None, *, is_zoo: bool) -> Fingerprints:
    """Returns the fingerprints of the data that the options choose, with its tokenizer."""
    choice = data_choice(options)
    if choice.path is None:
        return _of_data(choice.name or default)
    files = find_files(choice.path)
    data = {f"the data {choice.path}": f"{len(files.paths)} files of {files.size_bytes} bytes, {files.digest()}"}
    if files.kind == "images":
        return data
    tokenizer = find_tokenizer(choice.tokenizer, model_folder, is_zoo=is_zoo)
    return data | {f"the tokenizer {tokenizer.name}": tokenizer.digest}


def _of_data(name: str) -> Fingerprints:
    kind = name.partition(":")[0]
    if kind == "stdlib":
        return {"the text of Python's standard library": _hash(read_stdlib())}
    if kind == "digits":
        return {"scikit-learn": _version("scikit-learn")}
    return {f"the data file {path}": f"{path.stat().st_size} bytes, {_hash_file(path)}" for path in data_files(name)}


def _hash_items(data: Dataset, seed: int) -> str | None:
    """Returns a hash over some items; None if they cannot be read, for which training raises a better error."""
    count, digest = len(data), sha256()
    numbers = {round(n * (count - 1) / (NUM_ITEMS - 1)) for n in range(NUM_ITEMS)} if count else set[int]()
    with _preserve_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed % 2**32)
        for number in sorted(numbers):
            try:
                leaves, form = pytree.tree_flatten(data.batch([number]))
            except Exception:  # user code may raise anything
                return None
            digest.update(str(form).encode())
            for leaf in leaves:
                digest.update(_bytes_of(leaf))
    return digest.hexdigest()


def _bytes_of(leaf: Any) -> bytes:
    if not isinstance(leaf, torch.Tensor):
        return (repr(leaf) if isinstance(leaf, str | int | float | bool | None) else type(leaf).__name__).encode()
    plain = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8) if leaf.numel() else torch.empty(0)
    return f"{leaf.dtype} {tuple(leaf.shape)} ".encode() + plain.numpy().tobytes()


@contextmanager
def _preserve_rng() -> Iterator[None]:
    """Restores the random generators of torch, Python and numpy on exit."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy:
                numpy.random.set_state(numpy_state)


def _hash(data: str | bytes) -> str:
    return sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def _hash_file(path: Path) -> str:
    try:
        with open_file(path) as file:
            return file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return _ABSENT


def _shown(text: str) -> str:
    """Returns a fingerprint for an error message, with hashes shortened."""
    *words, last = text.split(" ")
    return " ".join([*words, f"sha256 {last[:_SHOWN]}…" if len(last) == 64 else last])
