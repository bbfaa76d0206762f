"""The source text of Python's standard library as a corpus of bytes, which needs no download."""

import os
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from pipedejavu.facts import InputError, read_file

LIMIT_BYTES = 8 << 20
"""Most bytes of the corpus."""

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Folders that differ between installations of the same Python."""

_TEST_SHARE = 20
"""One in this many windows is for tests: those at the end."""


@lru_cache(maxsize=2)
def read_stdlib(limit_bytes: int = LIMIT_BYTES) -> bytes:
    """Returns the sources in the order of their paths, up to `limit_bytes`; cached per process.

    The text depends on the version of Python.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    body = bytearray()
    for path in sorted(_sources(folder), key=lambda path: path.relative_to(folder).as_posix()):
        if len(body) >= limit_bytes:
            break
        body += read_file(path)
    if not body:
        raise InputError(f"there are no .py files in {folder}, where Python's standard library should be; use 'random'")
    return bytes(body[:limit_bytes])


def _sources(folder: Path) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        yield from (Path(here, name) for name in names if name.endswith(".py"))


class Text:
    """Adjacent windows of a text, each with the byte that follows it."""

    def __init__(self, text: bytes, context: int, is_test: bool = False):
        corpus = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        total = (len(corpus) - 1) // context
        num_test = total // _TEST_SHARE
        self._first = total - num_test if is_test else 0
        self._size = num_test if is_test else total - num_test
        self._corpus = corpus
        self._context = context
        if not self._size:
            raise InputError(f"a text of {len(text)} bytes has no window of {context}; lower the context")

    def __len__(self) -> int:
        return self._size

    def windows(self, indices: Tensor) -> Tensor:
        """Returns token ids [samples, context + 1]."""
        starts = (indices + self._first) * self._context
        return self._corpus[starts.unsqueeze(1) + torch.arange(self._context + 1, device="cpu")].long()
