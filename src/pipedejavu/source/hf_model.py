"""Models of Hugging Face's transformers, built from a configuration with random weights, on data of the zoo."""

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipedejavu.facts import InputError, read_file
from pipedejavu.facts.file import check_file
from pipedejavu.source.hf_config import bounded_build, check_configuration, offline
from pipedejavu.source.initial_weights import load_weights
from pipedejavu.zoo import Dataset, Task, open_data
from pipedejavu.zoo.form import Form, ImageForm, TokenForm
from pipedejavu.zoo.loss import count, cross_entropy

MOST_TOKENS, MOST_ESTIMATED = 128, 4096
"""Of a sequence that runs, and of one that is only counted, where the configuration allows as many."""
_NUM_BYTES = 256

_HEADS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("AutoModelForImageClassification", "image", ("pixel_values",)),
    ("AutoModelForSeq2SeqLM", "reversed", ("input_ids", "decoder_input_ids")),
    ("AutoModelForMaskedLM", "masked", ("input_ids",)),
    ("AutoModelForCausalLM", "next", ("input_ids",)),
)
"""What a configuration can be built as, in the order in which it is tried: what is asked, and the inputs."""


def build_hf_model(
    name: str,
    *,
    seed: int = 0,
    data: str | None = None,
    weights: str | None = None,
    device: str | None = None,
    context: int | None = None,
) -> Task:
    """Builds the task that the command line calls hf:NAME: a configuration's file or folder, or its name on the hub.

    `weights` are a file, a folder or a name on the hub, too. `context` is the length of its sequences; by default what
    the configuration allows, within a bound.
    """
    check_data(name, data, weights)
    room = _transformers(name)
    config = _read_config(room, name)
    torch.manual_seed(seed)
    with bounded_build(name):
        config.use_cache = False  # what generating keeps would pass from unit to unit
        head, objective, inputs = _choose_head(room, config, name)
        if weights is not None and not Path(weights).is_file():
            model = _read_model(room, head, config, weights)
        else:
            with torch.device(device or torch.get_default_device()), offline():
                model = getattr(room, head).from_config(config, dtype=torch.get_default_dtype())
            if weights is not None:
                load_weights(model, weights)
        model.train()
        most = MOST_ESTIMATED if device == "meta" else MOST_TOKENS
        form = _form(config, objective, most, context, _num_reserved(model))
    has_text = isinstance(form, TokenForm) and form.num_plain >= _NUM_BYTES
    source = open_data(data or ("stdlib" if has_text else "random"), form, seed=seed)
    counts = count if isinstance(form, TokenForm) else len
    return Task(name=name, model=model, loss=_loss, count=counts, data=_Named(source, inputs))


def check_data(name: str, data: str | None, weights: str | None) -> None:
    """Raises InputError for pretrained weights without data of their own."""
    if weights is not None and data is None:
        raise InputError(
            f"'hf:{name}' begins with pretrained weights, and no data is named to train them on: by default that would"
            " be bytes of Python's standard library as token ids; name one with --data ('stdlib' for these), or return"
            " the model and your own samples from FILE.py:FUNCTION"
        )


def read_config_text(name: str) -> bytes:
    """Returns a configuration as its file has it, or as the hub does."""
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.suffix == ".json":
        return read_file(path)
    text: str = _read_config(_transformers(name), name).to_json_string()
    return text.encode()


def _transformers(name: str) -> Any:
    try:
        return import_module("transformers")
    except ImportError:
        raise InputError(f"'hf:{name}' needs transformers; pip install 'pipedejavu[hf]'") from None


def _read_config(room: Any, name: str) -> Any:
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    try:
        if path.suffix != ".json":
            plain, _ = room.PreTrainedConfig.get_config_dict(name)
            check_configuration(plain, name)
            return room.AutoConfig.from_pretrained(name, trust_remote_code=False)
        plain = json.loads(read_file(path))
        check_configuration(plain, name)
        with offline():
            return room.AutoConfig.for_model(plain.pop("model_type"), **plain)
    except InputError:
        raise
    except KeyError as error:
        raise InputError(f"{path} has no {error}, which says what kind of model it is; add it") from None
    except Exception as error:
        text = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(f"cannot read the configuration 'hf:{name}': {text}") from None


def _read_model(room: Any, head: str, config: Any, weights: str) -> nn.Module:
    """Returns a model with weights as transformers reads them, old names and bodies without a head included."""
    if Path(weights).is_dir():
        _check_files(Path(weights))
    options = {"config": config, "dtype": torch.get_default_dtype(), "use_safetensors": True}
    room.utils.logging.disable_progress_bar()  # of which every worker would show its own
    try:
        model, read = getattr(room, head).from_pretrained(weights, **options, output_loading_info=True)
    except Exception as error:
        text = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(
            f"cannot read the weights '{weights}': {text}; give a file or folder of safetensors, or a name on the hub"
        ) from None
    finally:
        room.utils.logging.enable_progress_bar()
    missing = sorted(read["missing_keys"])
    if missing:
        raise InputError(
            f"'{weights}' has no '{missing[0]}'{f' and {len(missing) - 1} more' if len(missing) > 1 else ''} of a"
            f" {type(model).__name__}; give weights that have all of it"
        )
    found: nn.Module = model
    return found


def _check_files(folder: Path) -> None:
    """Raises InputError where a folder holds what a reader would wait for."""
    for path in folder.iterdir():
        try:
            if not path.is_dir():
                check_file(path)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None


def _choose_head(room: Any, config: Any, name: str) -> tuple[str, str, tuple[str, ...]]:
    for head, objective, inputs in _HEADS:
        fits = type(config) in getattr(room, head)._model_mapping
        if fits and (objective != "reversed" or config.is_encoder_decoder):
            return head, objective, inputs
    raise InputError(
        f"'hf:{name}' is a {type(config).__name__}, which makes no language model and classifies no images; write a"
        " function that returns (model, loss, samples) and give FILE.py:FUNCTION"
    )


def _num_reserved(model: nn.Module) -> int:
    """Returns how many positions a model numbers before the first token's: those up to that of padding, as RoBERTa."""
    tables = [part for name, part in model.named_modules() if name.endswith("position_embeddings")]
    return max((1 + found for part in tables if (found := getattr(part, "padding_idx", None)) is not None), default=0)


def _form(config: Any, objective: Any, most: int, context: int | None, num_reserved: int) -> Form:
    """Returns the form of the samples that a configuration asks for."""
    if objective == "image":
        if context is not None:
            raise InputError(f"--context is {context}, but a {type(config).__name__} sees images; leave --context out")
        size = getattr(config, "image_size", None) or 32
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(config, "num_channels", 3)
        return ImageForm(shape=(channels, height, width), classes=config.num_labels)
    positions = (getattr(config, "max_position_embeddings", None) or most + num_reserved) - num_reserved
    if context is not None and not 1 <= context <= positions:
        raise InputError(f"--context is {context}, and the configuration has 1 to {positions} positions; give as many")
    length = max(1, min(most, positions)) if context is None else context
    return TokenForm(context=length, vocabulary=config.vocab_size, objective=objective)


class _Named(Dataset):
    """Data whose inputs have the names that a model calls them by."""

    def __init__(self, source: Dataset, names: Sequence[str]):
        self.source, self.names = source, names

    def __len__(self) -> int:
        return len(self.source)

    def batch(self, indices: Tensor | Sequence[int]) -> tuple[Any, Any]:
        """Returns keyword arguments, and targets."""
        inputs, targets = self.source.batch(indices)
        return dict(zip(self.names, inputs if isinstance(inputs, tuple) else (inputs,), strict=True)), targets


def _loss(output: Any, targets: Any) -> Tensor:
    return cross_entropy(output.logits, targets)
