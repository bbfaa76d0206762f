"""Import and export of other formats: Hugging Face safetensors and torch.distributed.checkpoint (DCP).

Imported tensors become a checkpoint of step 0. Pickles are read only if the caller allows it, and only by readers that
build nothing but tensors and torch's own records: torch's `weights_only`, and for DCP's metadata, which torch unpickles
unchecked, a restricted unpickler of our own.
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
"""The classes that DCP metadata may consist of."""


def export_hf(checkpoint: Checkpoint, folder: str | Path, *, config: str | Path | None = None) -> Path:
    """Writes weights and buffers to a new folder in Hugging Face's layout, with `config.json` if it is passed."""
    with _written_to(folder) as target:
        _write_hf(checkpoint, target, config)
    return target


def _write_hf(checkpoint: Checkpoint, target: Path, config: str | Path | None) -> None:
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
        write_shard(target / file, {_plain_name(name): checkpoint.tensor(name) for name in names})
        weight_map |= {_plain_name(name): file for name in names}
    if count > 1:
        total = sum(entries[name].size_bytes for name in kept)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    if config is not None:
        (target / "config.json").write_bytes(read_file(config))


def import_hf(folder: str | Path, checkpoint_dir: str | Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Makes a checkpoint of step 0 from a Hugging Face folder; reads pickles only with `allow_pickle`."""
    tensors = read_weights(folder, allow_pickle=allow_pickle)
    return _keep(checkpoint_dir, {f"weight/{name}": tensor for name, tensor in tensors.items()})


def read_weights(source: str | Path, *, allow_pickle: bool = False) -> Tensors:
    """Reads a safetensors file, or all of a folder; reads pickles only with `allow_pickle`."""
    path = Path(source)
    if not path.exists():
        raise InputError(f"cannot read {path}: there is no such file or folder")
    tensors: Tensors = {}
    for file in _hf_files(path, allow_pickle) if path.is_dir() else [path]:
        tensors |= _read_pickle(file) if file.suffix == ".bin" and allow_pickle else _read_safetensors(file)
    return tensors


def export_dcp(checkpoint: Checkpoint, folder: str | Path) -> Path:
    """Writes a checkpoint in the format of torch.distributed.checkpoint, with the keys of `get_state_dict`."""
    model: Tensors = {}
    state: dict[str, Tensors] = {}
    for name in checkpoint.names():
        kind, _, plain_name = name.partition("/")
        if kind in ("weight", "buffer"):
            model[plain_name] = checkpoint.tensor(name)
        elif kind == "state":
            slot, _, parameter = plain_name.partition("/")
            state.setdefault(parameter, {})[slot] = checkpoint.tensor(name)
    dcp: Any = import_module("torch.distributed.checkpoint")
    with _written_to(folder) as target, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that a single process writes
        dcp.save({"model": model, "optim": {"state": state}}, checkpoint_id=target, no_dist=True)
    return target


def import_dcp(folder: str | Path, checkpoint_dir: str | Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Makes a checkpoint of step 0 from a torch.distributed.checkpoint folder, including optimizer state.

    DCP files are pickles, so `allow_pickle` is required.
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
    except Exception as error:  # malformed metadata can raise anything
        raise InputError(f"cannot read {source}: its metadata does not fit its tensors ({error})") from None
    if not tensors:
        raise InputError(f"{source} has no tensors under 'model.'; save {{'model': model.state_dict()}}")
    return _keep(checkpoint_dir, tensors)


def _plain_name(name: str) -> str:
    return name.partition("/")[2]


def _native_name(full: str) -> str | None:
    """Returns the checkpoint's name for a DCP tensor, or None if checkpoints do not hold such a tensor."""
    kind, _, rest = full.partition(".")
    if kind == "model":
        return f"weight/{rest}"
    name, _, slot = rest.removeprefix("state.").rpartition(".")
    is_state = kind in ("optim", "optimizer") and rest.startswith("state.") and bool(name)
    return f"state/{slot}/{name}" if is_state else None


@contextmanager
def _written_to(folder: str | Path) -> Iterator[Path]:
    """Creates the folder to write to; turns an OSError while it is written into an InputError."""
    path = Path(folder)
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InputError(f"{path} is there already; choose another folder")
        path.mkdir(parents=True, exist_ok=True)
        yield path
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None


def _hf_files(source: Path, allow_pickle: bool) -> list[Path]:
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
    files = sorted(source.glob("*.safetensors"))
    pickles = sorted(source.glob("pytorch_model*.bin"))
    if files or not pickles:
        if not files:
            raise InputError(f"{source} has no file *.safetensors")
        return files
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
    except (SafetensorError, ValueError, TypeError, RuntimeError, MemoryError) as error:  # unusual shapes and sizes
        raise InputError(f"cannot read {path}: {error}") from None


def _read_pickle(path: Path) -> Tensors:
    contents = _load_safely(io.BytesIO(read_file(path, _MOST_PICKLE_BYTES)), path)
    if not isinstance(contents, dict):
        raise InputError(f"cannot read {path}: it holds a {type(contents).__name__}, not tensors by name")
    return {str(name): tensor for name, tensor in contents.items() if isinstance(tensor, torch.Tensor)}


def _load_safely(data: io.BytesIO, path: Path) -> Any:
    try:
        return torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:  # malformed files can raise anything
        text = str(error).partition("\n")[0]
        raise InputError(f"cannot read {path}: it holds more than tensors, or is broken ({text})") from None


class _DcpReader(pickle._Unpickler):
    """Builds the records of DCP's metadata, and refuses any other class.

    It uses the unpickler written in Python: the C one allocates as many memo slots as a number in the file says.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Returns a class if it is in the list; raises UnpicklingError otherwise."""
        # Some versions of Python pickle paths under a submodule of pathlib.
        known = _DCP_CLASSES.get("pathlib" if module.startswith("pathlib.") else module, set())
        if name not in known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def _read_metadata(path: Path) -> Any:
    try:
        return _DcpReader(io.BytesIO(read_file(path, _MOST_METADATA_BYTES))).load()
    except InputError:
        raise
    except Exception as error:  # malformed files can raise anything
        raise InputError(f"cannot read {path}: it is no metadata of torch.distributed.checkpoint ({error})") from None


def _assembled(source: Path, metadata: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that checkpoints hold, each assembled from its chunks."""
    for full, form in metadata.state_dict_metadata.items():
        name = _native_name(full)
        if name is None or not hasattr(form, "chunks"):
            continue
        chunks = list(_chunks(source, metadata, full))
        count, num_stored = prod(form.size), sum(data.numel() for _, data in chunks)
        if count != num_stored:  # checked before memory is allocated
            raise InputError(f"cannot read {source}: '{full}' has {count} elements, and its chunks have {num_stored}")
        whole = torch.empty(form.size, dtype=form.properties.dtype)
        for offset, data in chunks:
            whole[tuple(slice(start, start + size) for start, size in zip(offset, data.shape, strict=True))] = data
        yield name, whole


def _chunks(source: Path, metadata: Any, full: str) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yields the chunks of a tensor with the offset of their first element."""
    for index, where in metadata.storage_data.items():
        if index.fqn == full:
            path = source / Path(where.relative_path).name
            try:
                with open_file(path) as file:
                    file.seek(where.offset)
                    size = min(where.length, os.fstat(file.fileno()).st_size)  # the length in the metadata may be wrong
                    data = _load_safely(io.BytesIO(file.read(size)), path)
            except OSError as error:
                raise InputError(f"cannot read {path}: {error.strerror}") from None
            yield tuple(index.offset or (0,) * data.ndim), data


def _keep(checkpoint_dir: str | Path, tensors: Tensors) -> Checkpoint:
    """Writes tensors to a new checkpoint directory, as a checkpoint of step 0."""
    target = CheckpointDir(checkpoint_dir)
    if target.has_traces:
        raise InputError(f"{target.path} holds checkpoints already; choose another folder")
    target.discard(0)
    shards: list[Tensors] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    staging = target.staging_dir(0)
    names = [shard_name(number) for number in range(len(shards))]
    written = merged({name: write_shard(staging / name, shard) for name, shard in zip(names, shards, strict=True)})
    about = Manifest(schema_version=SCHEMA_VERSION, step=0, samples=0, parts=written[0], tensors=written[1])
    return Checkpoint(target.commit(0, about))
