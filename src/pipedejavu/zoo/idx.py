"""The IDX format of MNIST: a magic number, sizes, then bytes; nothing in a file is trusted."""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from pipedejavu.facts import InputError

_GZIP = b"\x1f\x8b"
_BYTE = 8
"""IDX's number for the type of unsigned bytes, the only one that MNIST uses."""

_MOST_BYTES = 1 << 31
_PART_BYTES = 1 << 20


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Reads an IDX file of unsigned bytes, plain or compressed with gzip; raises InputError for any other."""
    try:
        with path.open("rb") as file:
            is_gzip = file.read(2) == _GZIP
            file.seek(0)
            if not is_gzip:
                return _read(file, path, dimensions)
            with gzip.GzipFile(fileobj=file) as inside:
                return _read(inside, path, dimensions)
    except EOFError:
        raise InputError(f"{path} ends in the middle of its gzip stream; get the file again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} is not valid gzip ({error}); get the file again") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def _read(file: "BinaryIO | gzip.GzipFile", path: Path, dimensions: int) -> Tensor:
    magic = file.read(4)
    wanted = bytes([0, 0, _BYTE, dimensions])
    if magic != wanted:
        raise InputError(
            f"{path} begins with {magic.hex() or 'nothing'}, but an IDX file of bytes in {dimensions} dimensions"
            f" begins with {wanted.hex()}"
        )
    header = file.read(4 * dimensions)
    if len(header) < 4 * dimensions:
        raise InputError(f"{path} ends inside its header of {dimensions} sizes; get the file again")
    sizes = struct.unpack(f">{dimensions}I", header)
    size = math.prod(sizes)
    if not 0 < size <= _MOST_BYTES:
        raise InputError(f"{path} says that it holds {'×'.join(map(str, sizes))} bytes; 1 to {_MOST_BYTES} can be read")
    body = _read_most(file, size + 1)
    if len(body) != size:
        found = f"only {len(body)}" if len(body) < size else "more"
        raise InputError(f"{path} says that it holds {'×'.join(map(str, sizes))} bytes, but has {found}")
    return torch.frombuffer(body, dtype=torch.uint8).view(sizes)


def _read_most(file: "BinaryIO | gzip.GzipFile", size: int) -> bytearray:
    """Reads up to `size` bytes part by part, so that a header that lies costs no memory."""
    body = bytearray()
    while len(body) < size:
        part = file.read(min(_PART_BYTES, size - len(body)))
        if not part:
            break
        body += part
    return body
