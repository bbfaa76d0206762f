"""The layout of `save_pretrained` beside the checkpoints of a Trainer, so that `from_pretrained` opens the folder."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from pipedejavu.facts import InputError

_INDEX = "model.safetensors.index.json"


def is_pretrained(model: nn.Module) -> bool:
    """Whether a model is one of transformers, with a configuration and `save_pretrained`."""
    return callable(getattr(model, "save_pretrained", None)) and hasattr(model, "config")


def check_tokenizer(tokenizer: Any) -> None:
    """Raises InputError for a tokenizer or processor that cannot be saved."""
    if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
        raise InputError(
            f"tokenizer is a {type(tokenizer).__name__} without save_pretrained(); give a tokenizer or processor of"
            " transformers"
        )


def save_pretrained(folder: Path, *parts: Any) -> None:
    """Writes a model, and its tokenizer if given, to a folder under temporary names, then renames each file.

    Weights are renamed before the index and the configuration, and files of an earlier model that are not overwritten
    are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".model.", suffix=".tmp", dir=folder))
    try:
        for part in parts:
            part.save_pretrained(temporary)
        written = sorted(temporary.iterdir(), key=lambda path: (path.suffix != ".safetensors", path.name))
        names = {path.name for path in written}
        for path in written:
            target = folder / path.name
            if path.is_dir():
                shutil.rmtree(target, ignore_errors=True)
            path.replace(target)
        stale = {path for pattern in ("model-*-of-*.safetensors", _INDEX) for path in folder.glob(pattern)}
        if _INDEX in names:
            stale |= {folder / "model.safetensors"}
        for path in stale:
            if path.name not in names:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"cannot write the model to {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
