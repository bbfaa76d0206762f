"""Describes the installation: packages and versions, compiler, native pass, GPUs, free memory and disk.

Each part states what it provides and how to get it. Nothing is measured, and torch need not be installed.
"""

import ctypes
import platform
import shutil
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipedejavu.probe.host import free_memory_bytes, read_host
from pipedejavu.probe.machine_shape import num_cores

PACKAGE = Path(__file__).parents[1]
_OPTIONAL = (
    ("torch", "train", "training, profiling and measuring"),
    ("safetensors", "train", "weights and checkpoints on disk"),
    ("transformers", "hf", "models from their configurations (hf:CONFIG)"),
    ("tokenizers", "text", "text as the tokens of a model"),
    ("peft", "lora", "train --lora"),
    ("pyarrow", "parquet", "data in .parquet files, and what datasets saves"),
    ("Pillow", "images", "folders of images"),
    ("scikit-learn", "data", "the digits, and two predictors of operators"),
    ("tensorboard", "tensorboard", "train --log tensorboard"),
    ("wandb", "wandb", "train --log wandb"),
    ("mlflow", "mlflow", "train --log mlflow"),
    ("ray", "ray", "Ray Train as a launcher"),
)
_REQUIRED = ("torch", "safetensors")
_OTHER_NAMES = {"mlflow": ("mlflow-skinny",)}
"""Other distributions that provide a package."""


@dataclass(frozen=True)
class InstalledPart:
    """A package or tool that is installed or missing."""

    name: str
    found: str | None
    """Its version or path; None if it is missing."""
    gives: str
    remedy: str
    """How to install it."""
    is_required: bool = False
    """Whether training needs it."""

    @property
    def is_missing(self) -> bool:
        """Whether it is not installed."""
        return self.found is None


@dataclass(frozen=True)
class Installation:
    """The parts of this installation."""

    python: str
    platform: str
    cores: int
    processor: str
    parts: tuple[InstalledPart, ...]
    gpus: tuple[str, ...]
    free_memory_bytes: int
    free_disk_bytes: int
    """Free space in the working directory, where runs are written."""

    @property
    def can_train(self) -> bool:
        """Whether everything that training needs is installed."""
        return not any(part.is_required and part.is_missing for part in self.parts)


def inspect_installation() -> Installation:
    """Finds out what is installed."""
    packages = tuple(
        InstalledPart(name, _version(name), gives, f"pip install 'pipedejavu[{extra}]'", name in _REQUIRED)
        for name, extra, gives in _OPTIONAL
    )
    return Installation(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        cores=num_cores(),
        processor=read_host().processor,
        parts=(*packages, _compiler(), _native()),
        gpus=_gpus(),
        free_memory_bytes=free_memory_bytes(),
        free_disk_bytes=shutil.disk_usage(Path.cwd()).free,
    )


def _version(name: str) -> str | None:
    for known in (name, *_OTHER_NAMES.get(name, ())):
        try:
            return version(known)
        except PackageNotFoundError:
            continue
    return None


def _compiler() -> InstalledPart:
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    return InstalledPart(
        "C compiler", compiler, "builds the native pass when the package is installed", "install gcc or clang"
    )


def _native() -> InstalledPart:
    gives = "fast updates by AdamW on a CPU; without it torch gives the same bits, slower"
    path = PACKAGE / "optim" / "_native.so"
    try:
        ctypes.CDLL(str(path))
        state = "built"
    except OSError:
        state = None
    return InstalledPart("native pass", state, gives, "install the package again where there is a C compiler")


def _gpus() -> tuple[str, ...]:
    if find_spec("torch") is None:
        return ()
    torch = import_module("torch")
    return tuple(_describe(torch, n) for n in range(torch.cuda.device_count()))


def _describe(torch: Any, gpu: int) -> str:
    """Returns a GPU's name, its memory, what this process may take of it if that is known, and how workers share it."""
    device = torch.device("cuda", gpu)
    size = f"{torch.cuda.get_device_properties(gpu).total_memory / 2**30:.0f} GiB"
    memory, ipc = (import_module(f"pipedejavu.runtime.{name}") for name in ("device_memory", "cuda_ipc"))
    with suppress(RuntimeError):
        size += f", {memory.DeviceMemory(device).limit_bytes() / 2**30:.0f} GiB of it for this process"
    way = "CUDA IPC" if ipc.can_share(device) else "host memory, as its driver exports no memory"
    return f"{torch.cuda.get_device_name(gpu)}, {size}, its workers exchange tensors through {way}"
