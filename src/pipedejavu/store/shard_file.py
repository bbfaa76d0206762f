"""A shard file of a checkpoint: tensors in the safetensors format, hashed when written and when read.

Files are written through `os`, in steps that can fail one by one, and synced to disk.
"""

import json
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipedejavu.facts.file import check_file, open_file, write_all
from pipedejavu.store.manifest import ITEM_BYTES, DamagedError, ShardFile, TensorEntry, unreadable

Tensors = dict[str, Tensor]
"""Tensors by name."""

_TYPES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.int64: "I64", torch.uint64: "U64", torch.float32: "F32", torch.int32: "I32",
    torch.uint32: "U32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int16: "I16", torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _TYPES.items()}

_CHUNK_BYTES = 2**24
_ALIGNMENT = 8


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> tuple[ShardFile, dict[str, TensorEntry]]:
    """Writes host tensors to a new file and syncs it; raises OSError and leaves the partial file if a write fails."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # keeps all aligned
    form: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    entries, end = {}, 0
    for name, tensor in ordered:
        form[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(form, ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(_ALIGNMENT, "little") + text
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        write_all(file, memoryview(header))
        for name, tensor in ordered:
            data = _bytes_of(tensor)
            entries[name] = TensorEntry(
                file=path.name,
                offset=len(header) + form[name]["data_offsets"][0],
                shape=tuple(tensor.shape),
                dtype=_TYPES[tensor.dtype],
                sha256=sha256(data).hexdigest(),
            )
            write_all(file, data)
        os.fsync(file)
        # The read that verifies the file must come from the disk, not from the page cache.
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)
    shard = ShardFile(size_bytes=len(header) + end, header_bytes=len(header), header_sha256=sha256(header).hexdigest())
    return shard, entries


def check_shard(path: Path, shard: ShardFile) -> None:
    """Raises DamagedError if a file is missing or its size or header differs, CheckpointError if it cannot be read."""
    try:
        size = check_file(path).st_size
    except OSError as error:
        raise unreadable(path, error) from None
    if size != shard.size_bytes:
        raise DamagedError(f"{path} has {size} bytes instead of {shard.size_bytes}: it was cut off or changed")
    if sha256(_read(path, 0, shard.header_bytes)).hexdigest() != shard.header_sha256:
        raise DamagedError(f"the header of {path} does not have its hash: it was changed")


def read_tensor(folder: Path, name: str, entry: TensorEntry) -> Tensor:
    """Reads a tensor; raises DamagedError if its bytes do not match its hash."""
    path = folder / entry.file
    data = _read(path, entry.offset, entry.size_bytes)
    if sha256(data).hexdigest() != entry.sha256:
        raise DamagedError(f"tensor '{name}' in {path} does not have its hash: it was changed on the disk")
    dtype = _DTYPES[entry.dtype]
    return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(entry.shape)


def check_tensor(folder: Path, name: str, entry: TensorEntry) -> None:
    """Raises DamagedError if a tensor's bytes do not match its hash; reads in chunks, to use little memory."""
    path, digest = folder / entry.file, sha256()
    for start in range(0, entry.size_bytes, _CHUNK_BYTES):
        digest.update(_read(path, entry.offset + start, min(_CHUNK_BYTES, entry.size_bytes - start)))
    if digest.hexdigest() != entry.sha256:
        raise DamagedError(f"tensor '{name}' in {path} does not have its hash: it was changed on the disk")


def is_storable(tensor: Tensor) -> bool:
    """Whether the file format supports a tensor's dtype."""
    return tensor.dtype in _TYPES


def _bytes_of(tensor: Tensor) -> memoryview:
    assert ITEM_BYTES[_TYPES[tensor.dtype]] == tensor.element_size()
    data: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)


def _read(path: Path, offset: int, size: int) -> bytearray:
    data = bytearray()
    try:
        with open_file(path) as file:
            # Checked before memory is allocated, so that a wrong size in a manifest costs nothing.
            missing = offset + size - os.fstat(file.fileno()).st_size
            if missing > 0:
                raise DamagedError(f"{path} ends {missing} bytes too early: it was cut off")
            data = bytearray(size)
            file.seek(offset)
            rest = memoryview(data)
            while rest and (count := os.readv(file.fileno(), [rest])):
                rest = rest[count:]
    except OSError as error:
        raise unreadable(path, error) from None
    if rest:
        raise DamagedError(f"{path} ends {len(rest)} bytes too early: it was cut off")
    return data
