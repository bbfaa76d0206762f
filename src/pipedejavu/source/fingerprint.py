"""Fingerprints of what a run is made of, its model's source and its data, each under a name that an error can use.

They are cheap and the same on every call: hashes of files, versions of packages, and for the data of a user's file
their length and a hash over some items. A run seals them into its checkpoints, and compares them when it goes on.
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

from pipedejavu.facts import InputError, open_file
from pipedejavu.facts.version import VERSION
from pipedejavu.run.options import TrainOptions
from pipedejavu.run.run_folder import RunStart
from pipedejavu.source.hf_model import read_config_text
from pipedejavu.source.model_source import open_task
from pipedejavu.zoo import Dataset, default_data
from pipedejavu.zoo.data import data_files
from pipedejavu.zoo.text import read_stdlib

NUM_ITEMS = 8
"""Items of a user's data that are hashed, from the first to the last."""
_SHOWN = 12
_INSTALLED = {"site-packages", "dist-packages"}
_ABSENT = "nothing"

Fingerprints = dict[str, str]


def read_fingerprints(options: TrainOptions) -> Fingerprints:
    """Returns the fingerprints of a run's model and data as they are now."""
    path, colon, _ = options.model.rpartition(":")
    if colon and path.endswith(".py"):
        return _of_file(options, Path(path).resolve())
    if options.model.startswith("hf:"):
        name = options.model.removeprefix("hf:")
        model = {f"the configuration {name}": _hash(read_config_text(name)), "transformers": _version("transformers")}
        return model | _of_data(options.data or "stdlib")
    return {f"pipedejavu, which has zoo:{options.model}": VERSION} | _of_data(
        options.data or default_data(options.model)
    )


def fingerprints_to_save(options: TrainOptions, start: RunStart | None) -> Fingerprints:
    """Returns the fingerprints for a run's checkpoints: those it began with, or new ones; none if nothing is saved."""
    known = start.fingerprints if start else {}
    saves = options.checkpoint_every != 0 or options.init_candidates > 1
    return known or (read_fingerprints(options) if saves else {})


def describe_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns what has another fingerprint than before, each with both of them."""
    return [
        f"{name} (before {_shown(text)}, now {_shown(now.get(name, _ABSENT))})"
        for name, text in before.items()
        if now.get(name, _ABSENT) != text
    ]


def _of_file(options: TrainOptions, path: Path) -> Fingerprints:
    """Opens a user's file; what it imports from beside it, and what its data are, is known only then."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    with _own_randomness():
        torch.set_default_dtype(getattr(torch, options.dtype))
        torch.set_num_threads(1)  # sums of data that are computed have the same bits
        try:
            data = open_task(options.model, seed=options.seed).data
            items = [_hash_items(data, options.seed) for _ in range(2)]
        finally:
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
    found = {f"the file {path.name}": _hash_file(path)}
    for module in sorted(_modules_beside(path)):
        found[f"the module {module.relative_to(path.parent).as_posix()}"] = _hash_file(module)
    found["the length of the data"] = str(len(data))
    if items[0] is not None and items[0] == items[1]:  # data that are random whatever the seed have no fingerprint
        found[f"{min(NUM_ITEMS, len(data))} items of the data"] = items[0]
    return found


def _modules_beside(path: Path) -> set[Path]:
    """Returns the files of imported modules in the folder of a user's file, apart from installed packages."""
    found = set()
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if name not in ("__main__", "__mp_main__") and isinstance(file, str):
            inside = Path(file).resolve()
            own = inside.is_relative_to(path.parent) and inside != path and inside.is_file()
            if own and not _INSTALLED & {*inside.parts} and name.partition(".")[0] != "pipedejavu":
                found.add(inside)
    return found


def _of_data(name: str) -> Fingerprints:
    kind = name.partition(":")[0]
    if kind == "stdlib":
        return {"the text of Python's standard library": _hash(read_stdlib())}
    if kind == "digits":
        return {"scikit-learn": _version("scikit-learn")}
    return {f"the data file {path}": f"{path.stat().st_size} bytes, {_hash_file(path)}" for path in data_files(name)}


def _hash_items(data: Dataset, seed: int) -> str | None:
    """Returns a hash over some items; None if they cannot be read, which training will say better."""
    count, digest = len(data), sha256()
    numbers = {round(n * (count - 1) / (NUM_ITEMS - 1)) for n in range(NUM_ITEMS)} if count else set[int]()
    with _own_randomness():
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed % 2**32)
        for number in sorted(numbers):
            try:
                leaves, form = pytree.tree_flatten(data.batch([number]))
            except Exception:  # whatever a user's data raise
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
def _own_randomness() -> Iterator[None]:
    """Puts the generators of torch, Python and numpy back to where they were."""
    numpy = sys.modules.get("numpy")
    state, own = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(state)
            if numpy:
                numpy.random.set_state(own)


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
    """Returns a fingerprint as an error shows it, hashes by their beginning."""
    *words, last = text.split(" ")
    return " ".join([*words, f"sha256 {last[:_SHOWN]}…" if len(last) == 64 else last])
