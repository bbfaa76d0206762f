"""A checkpoint on disk: its manifest, and its tensors by name, each verified as it is read."""

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
_FINITE = re.compile(r"(?:replica/\d+/)?state/(?:exp_avg(?:_sq)?(?:_scale)?|momentum_buffer)/")
"""Names of tensors that may not hold infinities; a weight may, such as an attention mask."""
WHOLE = re.compile("step-(0|[1-9][0-9]{0,17})")
"""The name of a complete checkpoint."""
_READERS = 4
"""Threads that verify tensors in parallel; reading and hashing release the interpreter lock."""


class Checkpoint:
    """The folder of one checkpoint, opened by reading its manifest.

    Raises CheckpointError if the manifest is not sound, or if it belongs to another step than the folder's name.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            data = read_regular(path / MANIFEST, Manifest.most_bytes)
        except OSError as error:
            raise unreadable(path / MANIFEST, error) from None
        self.manifest = Manifest.from_bytes(data, str(path / MANIFEST))
        named = WHOLE.fullmatch(path.name)
        if named and int(named[1]) != self.step:
            raise CheckpointError(
                f"{path} has the manifest of step {self.step}: it was renamed or copied there; name it"
                f" step-{self.step}, or move it away"
            )

    @property
    def step(self) -> int:
        """Updates made before the checkpoint was taken."""
        return self.manifest.step

    def verify(self) -> None:
        """Reads every file; raises DamagedError if any byte differs from what was written."""
        for name, shard in self.manifest.parts.items():
            check_shard(self.path / name, shard)
        with ThreadPoolExecutor(_READERS) as pool:
            list(pool.map(lambda item: check_tensor(self.path, *item), self.manifest.tensors.items()))

    def nonfinite(self) -> str | None:
        """Returns the name of a tensor whose NaN or infinite values would spoil training, or None."""
        with ThreadPoolExecutor(_READERS) as pool:
            names = self.manifest.tensors
            sound = pool.map(lambda name: is_sound(name, self.tensor(name)), names)
            return next((name for name, is_finite in zip(names, sound, strict=True) if not is_finite), None)

    def names(self, prefix: str = "") -> list[str]:
        """Returns the names of the tensors that begin with `prefix`."""
        return [name for name in self.manifest.tensors if name.startswith(prefix)]

    def tensor(self, name: str) -> Tensor:
        """Reads a tensor into host memory; raises CheckpointError if it is missing, DamagedError if it changed."""
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} has no tensor '{name}'")
        return read_tensor(self.path, name, entry)

    def tensors(self, names: Iterable[str]) -> Tensors:
        """Reads several tensors into host memory."""
        return {name: self.tensor(name) for name in names}


def is_sound(name: str, tensor: Tensor) -> bool:
    """Whether training can go on with a tensor: it has no NaN, and no infinity if it is an optimizer moment."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    bounds = torch.aminmax(tensor.float() if tensor.element_size() == 1 else tensor)
    is_bad = (lambda value: not math.isfinite(value)) if _FINITE.match(name) else math.isnan
    return not any(is_bad(float(value)) for value in bounds)
