"""One checkpoint that is there: its manifest, and its tensors by name, each verified as it is read."""

import math
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from pipedejavu.facts.file import read_regular
from pipedejavu.store.manifest import CheckpointError, Manifest, unreadable
from pipedejavu.store.shard_file import Tensors, check_shard, check_tensor, read_tensor

MANIFEST = "manifest.json"
_FINITE = re.compile(r"(?:replica/\d+/)?state/(?:exp_avg|exp_avg_sq|momentum_buffer)/")
"""Names of tensors without infinities; a model may hold them on purpose, as in a mask of attention."""
WHOLE = re.compile("step-(0|[1-9][0-9]{0,17})")
"""The name of a checkpoint that is whole."""
_READERS = 4
"""Threads that verify; hashing and reading let others run beside them."""


class Checkpoint:
    """A checkpoint's folder, whose manifest was read and is sound; raises CheckpointError for any other.

    A folder called step-N must hold the checkpoint of step N.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            data = read_regular(path / MANIFEST, Manifest.most_bytes)
        except OSError as error:
            raise unreadable(path / MANIFEST, error) from None
        self.manifest = Manifest.unsealed(data, str(path / MANIFEST))
        named = WHOLE.fullmatch(path.name)
        if named and int(named[1]) != self.step:
            raise CheckpointError(
                f"{path} has the manifest of step {self.step}: it was renamed or copied there; name it"
                f" step-{self.step}, or move it away"
            )

    @property
    def step(self) -> int:
        """Updates that were made before it was taken."""
        return self.manifest.step

    def verify(self) -> None:
        """Reads everything; raises DamagedError if one bit is not as it was written."""
        for name, part in self.manifest.parts.items():
            check_shard(self.path / name, part)
        with ThreadPoolExecutor(_READERS) as pool:
            list(pool.map(lambda item: check_tensor(self.path, *item), self.manifest.tensors.items()))

    def nonfinite(self) -> str | None:
        """Returns the name of a tensor that training cannot go on with because it is not finite, or None."""
        with ThreadPoolExecutor(_READERS) as pool:
            names = self.manifest.tensors
            sound = pool.map(lambda name: is_sound(name, self.tensor(name)), names)
            return next((name for name, is_finite in zip(names, sound, strict=True) if not is_finite), None)

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


def is_sound(name: str, tensor: Tensor) -> bool:
    """Whether training can go on with a tensor of a checkpoint: it holds no NaN, and no moment an infinity."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    bounds = torch.aminmax(tensor.float() if tensor.element_size() == 1 else tensor)
    is_bad = (lambda value: not math.isfinite(value)) if _FINITE.match(name) else math.isnan
    return not any(is_bad(float(value)) for value in bounds)
