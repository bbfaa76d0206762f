"""The manifest of a checkpoint: the file, offset, shape, dtype and hash of each tensor.

It is JSON. The first line holds the manifest hash: the SHA-256 of everything after that line, in the field `seal`.
Nothing is used before it is checked: file names cannot lead out of the folder, and tensors must lie inside their file.
"""

import re
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from pipedejavu.facts import FaultsError, InputError, Record

SCHEMA_VERSION = 1

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "F8_E4M3": 1,
    "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes per element of the dtypes of safetensors."""

_MOST = 2**63
"""Sizes must fit torch's signed 64-bit integers."""
_MOST_DIMENSIONS = 64

Count = Annotated[int, Field(ge=0, lt=_MOST)]

_SHARD_NAME = re.compile(r"part-[0-9]{5}\.safetensors")
_HASH_LINE = re.compile(rb'\{"seal": "([0-9a-f]{64})",\n')
_VERSION = re.compile(rb'\s*"schema_version":\s*([0-9]{1,9})\b')
"""The field that is read first, so that a manifest of a newer version is recognised whatever else it holds."""


class CheckpointError(InputError):
    """A checkpoint cannot be used; the text says why. This alone does not prove damage."""


class DamagedError(CheckpointError):
    """A checkpoint is proved to differ from what was written: a file is missing, or its size or hash has changed."""


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Returns the error for a file that cannot be read: damage if it is missing, else only a failure to read."""
    kind = DamagedError if isinstance(error, FileNotFoundError) else CheckpointError
    return kind(f"cannot read {path}: {error.strerror}")


class TensorEntry(Record):
    """Where a tensor is stored, its shape and dtype, and the hash of its bytes."""

    file: str
    offset: Count
    """Position of its first byte in the file."""
    shape: tuple[Annotated[int, Field(lt=_MOST)], ...] = Field(max_length=_MOST_DIMENSIONS)
    dtype: str
    sha256: str

    @property
    def size_bytes(self) -> int:
        """Size of the tensor."""
        return 0 if 0 in self.shape else _product(self.shape) * ITEM_BYTES[self.dtype]


class ShardFile(Record):
    """A shard file: its size, and the hash of its safetensors header."""

    size_bytes: Count
    header_bytes: Annotated[int, Field(ge=8, lt=_MOST)]
    header_sha256: str


class Manifest(Record):
    """Everything in a checkpoint except the bytes of its tensors."""

    most_bytes: ClassVar[int] = 1 << 28

    schema_version: int
    step: Count
    """Updates made so far."""
    samples: Count
    """Samples trained on so far; the next update begins with this sample."""
    loss: float | None = None
    """Mean loss of the steps since the previous checkpoint."""
    plan: dict[str, Any] = Field(default={})
    """The plan that the run used; any other plan can load the same tensors."""
    facts: dict[str, Any] = Field(default={})
    """Other state that a resumed run needs."""
    libraries: dict[str, str] = Field(default={})
    parts: dict[str, ShardFile]
    tensors: dict[str, TensorEntry]

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.agreed()

    def disagreements(self) -> list[str]:
        """Returns a fault for each file name and each tensor that is not valid."""
        faults = [f"part '{name}' is no name of a part" for name in self.parts if not _SHARD_NAME.fullmatch(name)]
        for name, entry in self.tensors.items():
            shard = self.parts.get(entry.file)
            if entry.dtype not in ITEM_BYTES:
                faults.append(f"tensor '{name}' has the unknown type '{entry.dtype}'")
            elif shard is None:
                faults.append(f"tensor '{name}' is in '{entry.file}', which is no part")
            elif not _is_shape(entry.shape) or entry.offset + entry.size_bytes > shard.size_bytes:
                faults.append(f"tensor '{name}' does not fit into '{entry.file}' of {shard.size_bytes} bytes")
        return faults

    @property
    def size_bytes(self) -> int:
        """Size of all shard files together."""
        return sum(shard.size_bytes for shard in self.parts.values())

    def to_bytes(self) -> bytes:
        """Returns the contents of the manifest file, which begins with the manifest hash."""
        rest = self.to_json().encode()[1:].lstrip() + b"\n"
        return b'{"seal": "%s",\n' % sha256(rest).hexdigest().encode() + rest

    @classmethod
    def from_bytes(cls, data: bytes, source: str) -> Self:
        """Parses `to_bytes`; raises DamagedError if the manifest hash differs, CheckpointError for other faults."""
        first_line = _HASH_LINE.match(data)
        if not first_line:
            raise DamagedError(f"{source} does not begin with its hash")
        rest = data[first_line.end() :]
        if sha256(rest).hexdigest().encode() != first_line[1]:
            raise DamagedError(f"{source} does not match the hash in its first line")
        version = _VERSION.match(rest)
        if version and int(version[1]) != SCHEMA_VERSION:
            raise CheckpointError(
                f"{source} has schema version {int(version[1])} and this program reads {SCHEMA_VERSION}; use the"
                " version of pipedejavu that wrote it"
            )
        try:
            return cls.from_json(b"{" + rest, source)
        except FaultsError as error:
            raise CheckpointError(str(error)) from None


def _is_shape(sizes: Sequence[int]) -> bool:
    """Whether torch can count the elements and strides of such a tensor."""
    return min(sizes, default=0) >= 0 and _product(sizes) < _MOST


def _product(shape: Sequence[int]) -> int:
    """Returns the product of the nonzero sizes, as torch computes strides; stops once it exceeds torch's limit."""
    product = 1
    for size in shape:
        product *= size or 1
        if product >= _MOST:
            break
    return product
