"""The manifest of a checkpoint: where each tensor lies, what it looks like, and the hash of its bytes.

It is JSON with a seal, the hash of all that follows it, in the first line. Nothing in it is believed before it has been
checked: names lead out of no folder, and no tensor lies outside its file.
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
"""The types of safetensors."""

_MOST = 2**63
"""What torch counts up to."""
_MOST_DIMENSIONS = 64

Count = Annotated[int, Field(ge=0, lt=_MOST)]

_PART = re.compile(r"part-[0-9]{5}\.safetensors")
_SEAL = re.compile(rb'\{"seal": "([0-9a-f]{64})",\n')
_VERSION = re.compile(rb'\s*"schema_version":\s*([0-9]{1,9})\b')
"""The first field, which can be read whatever else a newer program writes."""


class CheckpointError(InputError):
    """A checkpoint cannot be used; its text says why. That alone does not prove that it is damaged."""


class DamagedError(CheckpointError):
    """A checkpoint is proved not to be what was written: a file is missing, or has another size or another hash."""


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Returns what to raise if a file cannot be read: only a missing file proves damage."""
    kind = DamagedError if isinstance(error, FileNotFoundError) else CheckpointError
    return kind(f"cannot read {path}: {error.strerror}")


class TensorEntry(Record):
    """A tensor: its place, its form and the hash of its bytes."""

    file: str
    offset: Count
    """Of its first byte in the file."""
    shape: tuple[Annotated[int, Field(lt=_MOST)], ...] = Field(max_length=_MOST_DIMENSIONS)
    dtype: str
    sha256: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return 0 if 0 in self.shape else _product(self.shape) * ITEM_BYTES[self.dtype]


class ShardFile(Record):
    """One file: its size, and its header, which other programs read."""

    size_bytes: Count
    header_bytes: Annotated[int, Field(ge=8, lt=_MOST)]
    header_sha256: str


class Manifest(Record):
    """All of a checkpoint but the bytes of its tensors."""

    most_bytes: ClassVar[int] = 1 << 28

    schema_version: int
    step: Count
    """Updates that were made."""
    samples: Count
    """Samples of the run that were trained on; the next update begins with the one of this number."""
    loss: float | None = None
    """The mean loss of the steps since the checkpoint before."""
    plan: dict[str, Any] = Field(default={})
    """How the run was spread; the tensors are the same under any other plan."""
    facts: dict[str, Any] = Field(default={})
    """What else training goes on from."""
    libraries: dict[str, str] = Field(default={})
    parts: dict[str, ShardFile]
    tensors: dict[str, TensorEntry]

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.agreed()

    def disagreements(self) -> list[str]:
        """Returns a fault for each name and each tensor that cannot be."""
        faults = [f"part '{name}' is no name of a part" for name in self.parts if not _PART.fullmatch(name)]
        for name, entry in self.tensors.items():
            part = self.parts.get(entry.file)
            if entry.dtype not in ITEM_BYTES:
                faults.append(f"tensor '{name}' has the unknown type '{entry.dtype}'")
            elif part is None:
                faults.append(f"tensor '{name}' is in '{entry.file}', which is no part")
            elif not _is_shape(entry.shape) or entry.offset + entry.size_bytes > part.size_bytes:
                faults.append(f"tensor '{name}' does not fit into '{entry.file}' of {part.size_bytes} bytes")
        return faults

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.size_bytes for part in self.parts.values())

    def sealed(self) -> bytes:
        """Returns the manifest as the bytes of its file."""
        rest = self.to_json().encode()[1:].lstrip() + b"\n"
        return b'{"seal": "%s",\n' % sha256(rest).hexdigest().encode() + rest

    @classmethod
    def unsealed(cls, data: bytes, source: str) -> Self:
        """Reads `sealed`; raises CheckpointError for anything else, DamagedError if the seal proves a change."""
        seal = _SEAL.match(data)
        if not seal:
            raise DamagedError(f"{source} does not begin with a seal")
        rest = data[seal.end() :]
        if sha256(rest).hexdigest().encode() != seal[1]:
            raise DamagedError(f"{source} does not have the hash of its seal")
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
    """Whether torch can count the elements and the strides of such a tensor."""
    return min(sizes, default=0) >= 0 and _product(sizes) < _MOST


def _product(shape: Sequence[int]) -> int:
    """Returns the product of the sizes that are not 0, by which torch counts strides; ends where it is too large."""
    found = 1
    for size in shape:
        found *= size or 1
        if found >= _MOST:
            break
    return found
