"""Weights and state to and from the folders of others: Hugging Face's safetensors, and torch's DCP.

What comes in becomes a checkpoint like all others. A pickle is read only where the caller allows it, and then by
readers that build tensors and torch's own records and nothing else: torch's `weights_only`, and for the metadata of
DCP, which torch itself unpickles without a check, one of our own.
"""

import io
import json
import os
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from pipedejavu.facts import InputError, open_file, read_file
from pipedejavu.facts.file import check_file
from pipedejavu.store.checkpoint import Checkpoint
from pipedejavu.store.checkpoint_dir import CheckpointDir, merged, shard_name
from pipedejavu.store.manifest import SCHEMA_VERSION, Manifest
from pipedejavu.store.shard_file import Tensors, write_shard

SHARD_BYTES = 5 * 2**30
_MOST_PICKLE_BYTES = 1 << 36
_MOST_METADATA_BYTES = 1 << 28
_INDEX = "model.safetensors.index.json"

_DCP_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip
"""All that the metadata of DCP is made of."""


def export_hf(checkpoint: Checkpoint, folder: str | Path, *, config: str | Path | None = None) -> Path:
    """Writes a checkpoint's weights and buffers to a new folder as Hugging Face has them, with a `config.json`."""
    with _written_to(folder) as target:
        _write_hugging(checkpoint, target, config)
    return target


def _write_hugging(checkpoint: Checkpoint, target: Path, config: str | Path | None) -> None:
    kept = [name for name in checkpoint.names() if name.startswith(("weight/", "buffer/"))]
    entries = checkpoint.manifest.tensors
    shards: list[list[str]] = [[]]
    size = 0
    for name in kept:
        if shards[-1] and size + entries[name].size_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += entries[name].size_bytes
    count = len(shards)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        write_shard(target / file, {_own_name(name): checkpoint.tensor(name) for name in names})
        weight_map |= {_own_name(name): file for name in names}
    if count > 1:
        total = sum(entries[name].size_bytes for name in kept)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    if config is not None:
        (target / "config.json").write_bytes(read_file(config))


def import_hf(folder: str | Path, checkpoint_dir: str | Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Makes a checkpoint, of step 0, of the weights in a Hugging Face folder; those in a pickle only where allowed."""
    tensors = read_weights(folder, allow_pickle=allow_pickle)
    return _keep(checkpoint_dir, {f"weight/{name}": tensor for name, tensor in tensors.items()})


def read_weights(source: str | Path, *, allow_pickle: bool = False) -> Tensors:
    """Reads a file of safetensors, or all those of a folder; pickles only where allowed."""
    path = Path(source)
    if not path.exists():
        raise InputError(f"cannot read {path}: there is no such file or folder")
    tensors: Tensors = {}
    for file in _hugging_files(path, allow_pickle) if path.is_dir() else [path]:
        tensors |= _read_pickle(file) if file.suffix == ".bin" and allow_pickle else _read_safetensors(file)
    return tensors


def export_dcp(checkpoint: Checkpoint, folder: str | Path) -> Path:
    """Writes a checkpoint as torch.distributed.checkpoint does, under the names of its `get_state_dict`."""
    model: Tensors = {}
    state: dict[str, Tensors] = {}
    for name in checkpoint.names():
        kind, _, own = name.partition("/")
        if kind in ("weight", "buffer"):
            model[own] = checkpoint.tensor(name)
        elif kind == "state":
            slot, _, parameter = own.partition("/")
            state.setdefault(parameter, {})[slot] = checkpoint.tensor(name)
    dcp: Any = import_module("torch.distributed.checkpoint")
    with _written_to(folder) as target, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that one process writes, which is what is asked for
        dcp.save({"model": model, "optim": {"state": state}}, checkpoint_id=target, no_dist=True)
    return target


def import_dcp(folder: str | Path, checkpoint_dir: str | Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Makes a checkpoint, of step 0, of a folder that torch.distributed.checkpoint wrote, optimizer state included.

    Its files are pickles, which need to be allowed.
    """
    source = Path(folder)
    if not allow_pickle:
        raise InputError(
            f"{source} holds pickles, as all folders of torch.distributed.checkpoint do; pass allow_pickle=True if you"
            " know where it comes from"
        )
    metadata = _read_metadata(source / ".metadata")
    try:
        tensors = dict(_assembled(source, metadata))
    except InputError:
        raise
    except Exception as error:  # whatever a stranger's records say
        raise InputError(f"cannot read {source}: its metadata does not fit its tensors ({error})") from None
    if not tensors:
        raise InputError(f"{source} has no tensors under 'model.'; save {{'model': model.state_dict()}}")
    return _keep(checkpoint_dir, tensors)


def _own_name(name: str) -> str:
    return name.partition("/")[2]


def _native_name(full: str) -> str | None:
    """Returns the name of a tensor of DCP in a checkpoint, or None for what has no place there."""
    kind, _, rest = full.partition(".")
    if kind == "model":
        return f"weight/{rest}"
    name, _, slot = rest.removeprefix("state.").rpartition(".")
    is_state = kind in ("optim", "optimizer") and rest.startswith("state.") and bool(name)
    return f"state/{slot}/{name}" if is_state else None


@contextmanager
def _written_to(folder: str | Path) -> Iterator[Path]:
    """Makes a new folder to write to; raises InputError where the system refuses that, or what is written to it."""
    path = Path(folder)
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InputError(f"{path} is there already; choose another folder")
        path.mkdir(parents=True, exist_ok=True)
        yield path
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None


def _hugging_files(source: Path, allow_pickle: bool) -> list[Path]:
    if (source / _INDEX).exists():
        try:
            names = sorted({*json.loads(read_file(source / _INDEX))["weight_map"].values()})
        except InputError:
            raise
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise InputError(f"{source / _INDEX} has no 'weight_map' from names to files") from None
        outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
        if outside:
            raise InputError(f"{source / _INDEX} names the file {outside[0]!r}, which is not in the folder")
        return [source / name for name in names]
    found = sorted(source.glob("*.safetensors"))
    pickles = sorted(source.glob("pytorch_model*.bin"))
    if found or not pickles:
        if not found:
            raise InputError(f"{source} has no file *.safetensors")
        return found
    if not allow_pickle:
        raise InputError(
            f"{source} has its weights in the pickle {pickles[0].name}; pass allow_pickle=True if you know where it"
            " comes from, or take the safetensors that most models have"
        )
    return pickles


def _read_safetensors(path: Path) -> Tensors:
    try:
        check_file(path)
        return load_file(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except (SafetensorError, ValueError, TypeError, RuntimeError, MemoryError) as error:  # odd shapes and sizes
        raise InputError(f"cannot read {path}: {error}") from None


def _read_pickle(path: Path) -> Tensors:
    found = _load_safely(io.BytesIO(read_file(path, _MOST_PICKLE_BYTES)), path)
    if not isinstance(found, dict):
        raise InputError(f"cannot read {path}: it holds a {type(found).__name__}, not tensors by name")
    return {str(name): tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}


def _load_safely(data: io.BytesIO, path: Path) -> Any:
    try:
        return torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a stranger's bytes make of it
        text = str(error).partition("\n")[0]
        raise InputError(f"cannot read {path}: it holds more than tensors, or is broken ({text})") from None


class _DcpReader(pickle._Unpickler):
    """Builds the records of DCP's metadata, and refuses all else.

    The unpickler that is written in C would take memory for as many memos as a number in the file says.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Returns a class of the list."""
        # As a pickle of another version of Python may write it.
        known = _DCP_CLASSES.get("pathlib" if module.startswith("pathlib.") else module, set())
        if name not in known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def _read_metadata(path: Path) -> Any:
    try:
        return _DcpReader(io.BytesIO(read_file(path, _MOST_METADATA_BYTES))).load()
    except InputError:
        raise
    except Exception as error:  # whatever a stranger's bytes make of it
        raise InputError(f"cannot read {path}: it is no metadata of torch.distributed.checkpoint ({error})") from None


def _assembled(source: Path, metadata: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that have a place in a checkpoint, each put together from its parts."""
    for full, form in metadata.state_dict_metadata.items():
        name = _native_name(full)
        if name is None or not hasattr(form, "chunks"):
            continue
        parts = list(_chunks(source, metadata, full))
        count, found = prod(form.size), sum(data.numel() for _, data in parts)
        if count != found:  # before memory is taken for what is not there
            raise InputError(f"cannot read {source}: '{full}' has {count} elements, and its parts have {found}")
        whole = torch.empty(form.size, dtype=form.properties.dtype)
        for place, data in parts:
            whole[tuple(slice(start, start + size) for start, size in zip(place, data.shape, strict=True))] = data
        yield name, whole


def _chunks(source: Path, metadata: Any, full: str) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yields the parts of a tensor with the place of their first element."""
    for index, where in metadata.storage_data.items():
        if index.fqn == full:
            path = source / Path(where.relative_path).name
            try:
                with open_file(path) as file:
                    file.seek(where.offset)
                    size = min(where.length, os.fstat(file.fileno()).st_size)  # which is read at once
                    data = _load_safely(io.BytesIO(file.read(size)), path)
            except OSError as error:
                raise InputError(f"cannot read {path}: {error.strerror}") from None
            yield tuple(index.offset or (0,) * data.ndim), data


def _keep(checkpoint_dir: str | Path, tensors: Tensors) -> Checkpoint:
    """Puts tensors on a shelf, as a checkpoint of step 0."""
    own = CheckpointDir(checkpoint_dir)
    if own.has_traces:
        raise InputError(f"{own.path} holds checkpoints already; choose another folder")
    own.discard(0)
    parts: list[Tensors] = [{}]
    for name, tensor in tensors.items():
        if parts[-1] and sum(t.nbytes for t in parts[-1].values()) + tensor.nbytes > SHARD_BYTES:
            parts.append({})
        parts[-1][name] = tensor
    draft = own.draft(0)
    names = [shard_name(number) for number in range(len(parts))]
    written = merged({name: write_shard(draft / name, part) for name, part in zip(names, parts, strict=True)})
    about = Manifest(schema_version=SCHEMA_VERSION, step=0, samples=0, parts=written[0], tensors=written[1])
    return Checkpoint(own.commit(0, about))
