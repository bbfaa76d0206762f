"""A folder of images with a subfolder for each class, resized once into a memory-mapped cache.

Classes are numbered in the order of their names. It reads images with Pillow and knows nothing of the model but the
form of its samples.
"""

import json
import math
import shutil
import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipedejavu.data.data_files import DataFiles
from pipedejavu.data.token_cache import cache_path
from pipedejavu.facts import InputError, nearest, open_file
from pipedejavu.facts.file import fresh_path, read_regular
from pipedejavu.zoo.dataset import Indices, check_indices
from pipedejavu.zoo.form import ImageForm


class ImageFolder:
    """Images of one size, each with the number of its class."""

    def __init__(self, files: DataFiles, form: ImageForm, classes: tuple[str, ...] | None = None):
        """`classes` are those of the data that is trained on, if these images are for evaluation."""
        self.form, self._shape = form, _shape(form)
        self.classes, self._labels = _labels(files, form, classes)
        key = {"images": files.digest(), "shape": self._shape}
        path = cache_path(key)
        pixels = _open(path, self._shape, len(files.paths))
        if pixels is None:
            _write(path, files, self._shape)
            pixels = _open(path, self._shape, len(files.paths))
        assert pixels is not None
        self._pixels = pixels

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Returns images from −1 to 1 in torch's default dtype, and the numbers of their classes."""
        vector = check_indices(indices, len(self))
        pixels = torch.from_numpy(np.ascontiguousarray(self._pixels[vector.numpy()]))
        images = pixels.to(torch.get_default_dtype()) / 127.5 - 1
        return images.reshape(-1, *self.form.shape), self._labels[vector]


def _shape(form: ImageForm) -> tuple[int, int, int]:
    """Returns the channels, height and width that a model's inputs have."""
    if len(form.shape) == 3 and form.shape[0] in (1, 3):
        return form.shape[0], form.shape[1], form.shape[2]
    side = math.isqrt(form.shape[0])
    if len(form.shape) == 1 and side * side == form.shape[0]:
        return 1, side, side
    shape = "×".join(map(str, form.shape))
    raise InputError(f"the model reads samples of {shape}, which no image with 1 or 3 channels has; use other data")


def class_names(files: DataFiles) -> tuple[str, ...]:
    """Returns the names of the classes, in the order of their numbers."""
    return tuple(sorted({path.relative_to(files.root).parts[0] for path in files.paths}))


def _labels(files: DataFiles, form: ImageForm, known: tuple[str, ...] | None) -> tuple[tuple[str, ...], Tensor]:
    folders = [path.relative_to(files.root).parts[0] for path in files.paths]
    loose = [path for path in files.paths if path.parent == files.root]
    if loose:
        raise InputError(
            f"{files.root} has images that are in no folder of a class, such as {loose[0].name}; put each into a folder"
            " that is named after its class"
        )
    classes = known or class_names(files)
    for name in class_names(files):
        if name not in classes:
            raise InputError(f"{files.root} has the class '{name}', and --data has not{nearest(name, classes)}")
    if len(classes) > form.classes:
        raise InputError(
            f"{files.root} has {len(classes)} classes, '{classes[0]}' to '{classes[-1]}', and the model has"
            f" {form.classes}; use a model with as many"
        )
    return classes, torch.tensor([classes.index(folder) for folder in folders])


def _open(path: Path, shape: tuple[int, ...], count: int) -> NDArray[np.uint8] | None:
    with suppress(OSError, ValueError, KeyError):
        about = json.loads(read_regular(path / "about.json"))
        if about == {"shape": [count, *shape]}:
            return np.memmap(path / "pixels.bin", dtype=np.uint8, mode="r", shape=(count, *shape))
    return None


def _write(path: Path, files: DataFiles, shape: tuple[int, int, int]) -> None:
    """Writes all images under a fresh name and renames the folder, so that readers see all of it or nothing."""
    image_package = _pillow(files)
    temporary = fresh_path(path)
    try:
        temporary.mkdir(parents=True)
        with (temporary / "pixels.bin").open("xb") as file:
            for source in files.paths:
                file.write(_read(image_package, source, shape).tobytes())
        (temporary / "about.json").write_text(json.dumps({"shape": [len(files.paths), *shape]}))
        if path.exists():  # left incomplete by a damaged disk, or another process was faster
            shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            temporary.rename(path)
    except OSError as error:
        raise InputError(
            f"cannot write images to {path.parent}: {error.strerror}; make room there, or set XDG_CACHE_HOME to another"
            " folder"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _pillow(files: DataFiles) -> Any:
    try:
        return import_module("PIL.Image")
    except ImportError:
        raise InputError(f"{files.root} has images, which need Pillow; pip install 'pipedejavu[images]'") from None


def _read(image_package: Any, path: Path, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Returns an image as channels × height × width bytes; one of another size is resized with bilinear filtering."""
    channels, height, width = shape
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an image with too many pixels only warns
        try:
            with open_file(path) as file, image_package.open(file) as image:
                plain = image.convert("L" if channels == 1 else "RGB")
                if plain.size != (width, height):
                    plain = plain.resize((width, height), image_package.Resampling.BILINEAR)
                array = np.asarray(plain, np.uint8)
        except Exception as error:  # Pillow's readers raise errors of many types
            raise InputError(f"{path} cannot be read as an image: {error}; remove it or write it again") from None
    return array[None] if channels == 1 else array.transpose(2, 0, 1)
