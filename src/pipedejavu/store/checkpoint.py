"""One checkpoint that is there: its manifest, and its tensors by name, each verified as it is read."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from pipedejavu.facts import InputError, read_file
from pipedejavu.store.manifest import CheckpointError, Manifest
from pipedejavu.store.part import Tensors, check_part, check_tensor, read_tensor

MANIFEST = "manifest.json"
_READERS = 4
"""Threads that verify; hashing and reading let others run beside them."""


class Checkpoint:
    """A checkpoint's folder, whose manifest was read and is sound; raises CheckpointError for any other."""

    def __init__(self, path: Path):
        self.path = path
        try:
            data = read_file(path / MANIFEST, Manifest.most_bytes)
        except InputError as error:
            raise CheckpointError(str(error)) from None
        self.manifest = Manifest.unsealed(data, str(path / MANIFEST))

    @property
    def step(self) -> int:
        """Updates that were made before it was taken."""
        return self.manifest.step

    def verify(self) -> None:
        """Reads everything; raises CheckpointError where one bit is not as it was written."""
        for name, part in self.manifest.parts.items():
            check_part(self.path / name, part)
        with ThreadPoolExecutor(_READERS) as pool:
            list(pool.map(lambda item: check_tensor(self.path, *item), self.manifest.tensors.items()))

    def names(self, prefix: str = "") -> list[str]:
        """Returns the names of its tensors that begin with `prefix`."""
        return [name for name in self.manifest.tensors if name.startswith(prefix)]

    def tensor(self, name: str) -> Tensor:
        """Reads one tensor into host memory; raises CheckpointError where it is not there or not as it was."""
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} has no tensor '{name}'")
        return read_tensor(self.path, name, entry)

    def tensors(self, names: Iterable[str]) -> Tensors:
        """Reads several tensors."""
        return {name: self.tensor(name) for name in names}
