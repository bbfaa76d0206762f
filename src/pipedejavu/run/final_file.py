"""Files that a run writes when it ends, each of which can be written to the run's folder or to another one."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from safetensors.torch import save_file
from torch import Tensor

from pipedejavu.facts import remove, replace_file, write_file
from pipedejavu.facts.file import fresh_path, sync_folder
from pipedejavu.run.metrics_file import append_metrics


class FinalFile(Protocol):
    """The content of a file."""

    @property
    def size_bytes(self) -> int:
        """The space that the file takes."""

    def write(self, path: Path) -> None:
        """Writes the file; raises OSError, InputError or SafetensorError if the disk refuses it."""


@dataclass(frozen=True)
class ModelFile:
    """A model's state dict, which replaces an old file at once."""

    trained: dict[str, Tensor]

    @property
    def size_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(weight.nbytes for weight in self.trained.values())

    def write(self, path: Path) -> None:
        """Writes the tensors to a temporary file and renames it."""
        temporary = fresh_path(path)
        try:
            for old in path.parent.glob(f"{path.name}.*.tmp"):  # left by a killed run
                remove(old)
            save_file(self.trained, temporary)
            _sync(temporary)
            temporary.replace(path)
            sync_folder(path.parent)
        except BaseException:
            remove(temporary)
            raise


@dataclass(frozen=True)
class TextFile:
    """A text."""

    text: str

    @property
    def size_bytes(self) -> int:
        """The bytes of the text in UTF-8."""
        return len(self.text.encode())

    def write(self, path: Path) -> None:
        """Writes the text."""
        write_file(path, self.text)


@dataclass(frozen=True)
class PendingMetrics:
    """Metrics that the run's disk has not taken: appended to the file there, or written with all others elsewhere."""

    metrics: Path
    """The metrics in the run's folder."""
    before: bytes
    """What they hold."""
    unwritten: bytes

    @property
    def size_bytes(self) -> int:
        """The bytes of all lines."""
        return len(self.before) + len(self.unwritten)

    def write(self, path: Path) -> None:
        """Appends the lines to the run's metrics, or writes all lines to another file."""
        if path == self.metrics:
            append_metrics(path, self.unwritten)
        else:
            replace_file(path, self.before + self.unwritten)


def _sync(path: Path) -> None:
    """Flushes a file to the disk; some file systems report a full disk only then."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
