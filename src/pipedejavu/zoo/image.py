"""Labelled images: digits, MNIST and CIFAR-10, from a package or their usual files, never from a pickle.

Images are kept as bytes; a batch is converted to the form that a model reads: scaled to −1…1, enlarged by a whole
factor, padded, repeated over channels, or flattened.
"""

import math
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from pipedejavu.facts import InputError, read_file
from pipedejavu.zoo.chain import Flow
from pipedejavu.zoo.dataset import Indices, check_indices
from pipedejavu.zoo.download import download_cifar10, download_mnist
from pipedejavu.zoo.form import ImageForm
from pipedejavu.zoo.idx import read_idx

Split = Literal["train", "test"]

_CLASSES = 10
_NUM_TRAIN_DIGITS = 1500
_CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32
_MOST_CIFAR_BYTES = 1 << 28
_CIFAR_REMEDY = "get the binary version, cifar-10-binary.tar.gz, and unpack it there"


class Images:
    """Labelled images as bytes [samples, channels, height, width], converted to a model's form."""

    def __init__(self, name: str, pixels: Tensor, labels: Tensor, form: ImageForm | None = None):
        self.form = form or ImageForm(shape=tuple(pixels.shape[1:]), classes=_CLASSES)
        if self.form.classes < _CLASSES:
            raise InputError(f"{name} has {_CLASSES} classes, but the model has {self.form.classes}; raise that")
        self._pixels = pixels
        self._labels = labels.long()
        self._target_shape = _target_shape(name, tuple(pixels.shape[1:]), self.form.shape)

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: Indices) -> tuple[Flow, Tensor]:
        """Returns images in torch's default dtype, and labels."""
        vector = check_indices(indices, len(self))
        pixels = self._pixels[vector]
        channels, height, width = self._target_shape
        factor = min(height // pixels.shape[2], width // pixels.shape[3])
        pixels = pixels.repeat_interleave(factor, dim=2).repeat_interleave(factor, dim=3)
        down, right = height - pixels.shape[2], width - pixels.shape[3]
        pixels = functional.pad(pixels, (right // 2, right - right // 2, down // 2, down - down // 2))
        images = pixels.expand(-1, channels, -1, -1).to(torch.get_default_dtype()) / 127.5 - 1
        return images.reshape(-1, *self.form.shape), self._labels[vector]


def _target_shape(name: str, actual: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, int, int]:
    """Returns channels, height and width to convert images to, with as many values as `wanted`."""
    shape = wanted
    if len(wanted) == 1:
        side = math.isqrt(wanted[0])
        shape = actual if math.prod(actual) == wanted[0] else (1, side, side)
    fits = (
        len(shape) == 3
        and math.prod(shape) == math.prod(wanted)
        and actual[0] in (1, shape[0])
        and actual[1] <= shape[1]
        and actual[2] <= shape[2]
    )
    if not fits:
        raise InputError(
            f"images of {name} are {'×'.join(map(str, actual))} and cannot be brought to"
            f" {'×'.join(map(str, wanted))}, which the model reads; use other data or another size of input"
        )
    channels, height, width = shape
    return channels, height, width


def read_digits(split: Split, form: ImageForm | None = None) -> Images:
    """Returns scikit-learn's 1,797 digits of 8×8 pixels; the last 297 are for tests."""
    try:
        datasets = import_module("sklearn.datasets")
    except ImportError:
        raise InputError(
            "data 'digits' is part of scikit-learn, which is not installed; pip install scikit-learn, or use 'random'"
        ) from None
    digits = _digits(datasets.load_digits)
    part = slice(None, _NUM_TRAIN_DIGITS) if split == "train" else slice(_NUM_TRAIN_DIGITS, None)
    pixels = torch.tensor(digits.images[part], dtype=torch.uint8, device="cpu").unsqueeze(1) * 15  # from 0…16
    return Images("digits", pixels, torch.tensor(digits.target[part], device="cpu"), form)


@cache
def _digits(load: Callable[[], Any]) -> Any:
    """Returns what scikit-learn reads from its file, once per process."""
    return load()


def read_mnist(folder: Path, split: Split, form: ImageForm | None = None) -> Images:
    """Reads the two IDX files of an MNIST split; downloads missing ones first."""
    start = "train" if split == "train" else "t10k"
    images, classes = mnist_files(folder, split)
    pixels, labels = read_idx(images, 3), read_idx(classes, 1)
    if len(pixels) != len(labels):
        raise InputError(f"{folder} has {len(pixels)} {start} images but {len(labels)} labels; get both files again")
    _check_labels(labels, folder / f"{start}-labels")
    return Images("mnist", pixels.unsqueeze(1), labels, form)


def mnist_files(folder: Path, split: Split) -> tuple[Path, Path]:
    """Returns the files of MNIST's images and labels; downloads missing ones first."""
    start = "train" if split == "train" else "t10k"
    return _find_idx(folder, f"{start}-images", 3), _find_idx(folder, f"{start}-labels", 1)


def _find_idx(folder: Path, start: str, dimensions: int) -> Path:
    names = [f"{start}{separator}idx{dimensions}-ubyte{end}" for separator in "-." for end in ("", ".gz")]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    return download_mnist(folder, names[1])


def read_cifar10(folder: Path, split: Split, form: ImageForm | None = None) -> Images:
    """Reads the binary files of a CIFAR-10 split: records of a label and 1,024 bytes each of red, green and blue."""
    records = torch.cat([_read_cifar(path) for path in cifar10_files(folder, split)])
    return Images("cifar10", records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0], form)


def cifar10_files(folder: Path, split: Split) -> list[Path]:
    """Returns the binary files of a CIFAR-10 split; downloads them if the folder has none of either split."""
    inside = folder / "cifar-10-batches-bin"
    folder = inside if inside.is_dir() else folder
    pattern = "data_batch_*.bin" if split == "train" else "test_batch.bin"
    if not any(folder.glob("*_batch*.bin")):
        pickled = [folder / "cifar-10-batches-py", folder / "data_batch_1", folder / "test_batch"]
        if any(path.exists() for path in pickled):
            raise InputError(f"{folder} has CIFAR-10 as Python pickles, which are not opened; {_CIFAR_REMEDY}")
        download_cifar10(folder)
    paths = sorted(folder.glob(pattern))
    if not paths:
        raise InputError(f"there are no {split} files of CIFAR-10 in {folder}; {_CIFAR_REMEDY}")
    return paths


def _read_cifar(path: Path) -> Tensor:
    body = read_file(path, _MOST_CIFAR_BYTES)
    if not body or len(body) % _CIFAR_RECORD_BYTES:
        raise InputError(f"{path} has {len(body)} bytes, which is no multiple of {_CIFAR_RECORD_BYTES}; get it again")
    records = torch.frombuffer(bytearray(body), dtype=torch.uint8).view(-1, _CIFAR_RECORD_BYTES)
    _check_labels(records[:, 0], path)
    return records


def _check_labels(labels: Tensor, path: Path) -> None:
    most = int(labels.max())
    if most >= _CLASSES:
        raise InputError(f"{path} has the label {most}, but there are {_CLASSES} classes; get it again")
