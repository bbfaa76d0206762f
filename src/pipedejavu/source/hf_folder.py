"""The result of a run on a Hugging Face model as a folder that `from_pretrained` opens."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from torch import Tensor

from pipedejavu.facts import InputError
from pipedejavu.source.hf_model import build_empty
from pipedejavu.store import read_weights

FOLDER = "pretrained"
"""Name of the folder inside a run folder."""
_TOKENIZER = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "spiece.model",
    "chat_template*", "preprocessor_config.json",
)  # fmt: skip
"""Patterns of the files that belong to a model's tokenizer or image processor."""


def write_pretrained(
    name: str,
    weights: Path,
    target: Path,
    sources: tuple[str | None, ...] = (),
    *,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
) -> Path:
    """Writes config.json and model.safetensors of 'hf:NAME' to a folder, with the tokenizer of the first source.

    `weights` is a file under the model's own parameter names; `sources` are folders that may hold a tokenizer. The
    model takes no memory beside its weights. `change` maps the weights to those of the configuration's model.
    """
    model = build_empty(name)
    state = dict(read_weights(weights))
    missing, _ = model.load_state_dict(change(state) if change else state, strict=False, assign=True)
    model.tie_weights()
    empty = sorted(name for name, parameter in model.named_parameters() if parameter.is_meta)
    if empty:
        raise InputError(f"{weights} has no '{empty[0]}' of '{name}', {len(missing)} names in all; train it again")
    with without_progress_bars():
        model.save_pretrained(target)
    for source in filter(None, sources):
        path = Path(source)
        if copy_tokenizer(path.parent if path.is_file() else path, target):
            break
    return target


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keeps transformers from drawing progress bars for the duration."""
    logging = import_module("transformers").utils.logging
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def copy_tokenizer(source: Path, target: Path) -> int:
    """Copies the files of a tokenizer from a folder to another, and returns how many there were."""
    if not source.is_dir():
        return 0
    files = {path for pattern in _TOKENIZER for path in source.glob(pattern) if path.is_file()}
    for path in files:
        shutil.copyfile(path, target / path.name)
    return len(files)
