"""Reads MNIST's IDX format (a magic number, sizes, then bytes) without trusting the file."""

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from pipedejavu.facts import InputError, open_file

_GZIP = b"\x1f\x8b"
_BYTE = 8
"""IDX's code for unsigned bytes, the only type that MNIST uses."""

_MOST_BYTES = 1 << 31
_MOST_RATIO, _SMALL_BYTES = 100, 1 << 26
"""Largest expansion that a gzip may claim (MNIST's expand 5 times), and a size below which any is accepted."""
_CHUNK_BYTES = 1 << 20


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Reads an IDX file of unsigned bytes, plain or gzipped; raises InputError for any other."""
    try:
        with open_file(path) as file:
            is_gzip = file.read(2) == _GZIP
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            if not is_gzip:
                return _read(file, path, dimensions, size)
            with gzip.GzipFile(fileobj=file) as inside:
                return _read(inside, path, dimensions, max(_SMALL_BYTES, _MOST_RATIO * size))
    except EOFError:
        raise InputError(f"{path} ends in the middle of its gzip stream; get the file again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} is not valid gzip ({error}); get the file again") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def _read(file: "BinaryIO | gzip.GzipFile", path: Path, dimensions: int, most_bytes: int) -> Tensor:
    """Reads the header and as many bytes as it states, at most `most_bytes`; refuses any other number of bytes."""
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
    if size > most_bytes and isinstance(file, gzip.GzipFile):
        raise InputError(
            f"{path} says that it holds {'×'.join(map(str, sizes))} bytes, more than {_MOST_RATIO} times its own;"
            " unpack it if that is right"
        )
    body = _read_most(file, min(size, most_bytes) + 1)
    if len(body) != size:
        actual = f"only {len(body)}" if len(body) < size else "more"
        raise InputError(f"{path} says that it holds {'×'.join(map(str, sizes))} bytes, but has {actual}")
    return torch.frombuffer(body, dtype=torch.uint8).view(sizes)


def _read_most(file: "BinaryIO | gzip.GzipFile", size: int) -> bytearray:
    """Reads up to `size` bytes in chunks, so that a wrong header costs no memory."""
    body = bytearray()
    while len(body) < size:
        chunk = file.read(min(_CHUNK_BYTES, size - len(body)))
        if not chunk:
            break
        body += chunk
    return body
