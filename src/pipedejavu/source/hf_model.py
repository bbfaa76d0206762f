"""Hugging Face models, built from a transformers configuration, with data of the zoo."""

import json
from collections.abc import Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipedejavu.data.data_choice import DataChoice
from pipedejavu.data.data_source import open_choice, open_held_out
from pipedejavu.data.text_tokenizer import FileTokenizer, find_tokenizer
from pipedejavu.facts import InputError, read_file
from pipedejavu.facts.file import check_file
from pipedejavu.source.document_probe import separates_documents
from pipedejavu.source.hf_config import bounded_build, check_configuration, offline
from pipedejavu.source.hub import check_source, hub_access
from pipedejavu.source.initial_weights import load_weights
from pipedejavu.zoo import Dataset, Task
from pipedejavu.zoo.form import Form, ImageForm, TokenForm
from pipedejavu.zoo.loss import count, cross_entropy

MOST_TOKENS, MOST_ESTIMATED = 128, 4096
"""Default sequence length of a model that runs, and of one that is only estimated, if the configuration allows it."""
_NUM_BYTES = 256
_POSITIONS = "position_ids"

_HEADS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("AutoModelForImageClassification", "image", ("pixel_values",)),
    ("AutoModelForSeq2SeqLM", "reversed", ("input_ids", "decoder_input_ids")),
    ("AutoModelForMaskedLM", "masked", ("input_ids",)),
    ("AutoModelForCausalLM", "next", ("input_ids",)),
)
"""(auto class, objective, input names) that a configuration can be built as, in the order of trial."""


def build_hf_model(
    name: str,
    *,
    seed: int = 0,
    choice: DataChoice | None = None,
    weights: str | None = None,
    device: str | None = None,
) -> Task:
    """Builds the task of 'hf:NAME', where NAME is a configuration's file or folder, or its name on the hub.

    `weights` is a file, a folder or a name on the hub; by default weights are random. The sequence length is by default
    what the configuration allows, up to a limit.
    """
    choice = choice or DataChoice()
    check_data(name, choice.name, weights)
    check_tokenizer(choice, weights)
    transformers = _transformers(name)
    config = _read_config(transformers, name)
    torch.manual_seed(seed)
    with bounded_build(name):
        config.use_cache = False  # the key-value cache would pass from unit to unit
        head, objective, inputs = _choose_head(transformers, config, name)
        if weights is not None and not Path(weights).is_file():
            model = _read_model(transformers, head, config, weights)
        else:
            with torch.device(device or torch.get_default_device()), offline():
                model = getattr(transformers, head).from_config(config, dtype=torch.get_default_dtype())
            if weights is not None:
                load_weights(model, weights)
        model.train()
        most = MOST_ESTIMATED if device == "meta" else MOST_TOKENS
        form = _form(config, objective, most, choice.context, _num_reserved(model))
    has_text = isinstance(form, TokenForm) and form.num_plain >= _NUM_BYTES
    default = "stdlib" if has_text else "random"
    folder = tokenizer_folder(name, weights)
    separates = cache(partial(separates_documents, model))
    source = open_choice(
        choice, form, default=default, seed=seed, model_folder=folder, is_zoo=False, separates=separates
    )
    held_out = open_held_out(
        choice, form, default=default, seed=seed, model_folder=folder, is_zoo=False, separates=separates
    )
    counts = count if isinstance(form, TokenForm) else len
    return Task(
        name=name, model=model, loss=logits_cross_entropy, count=counts, data=_Named(source, inputs),
        held_out=None if held_out is None else _Named(held_out, inputs),
    )  # fmt: skip


def build_empty(name: str) -> Any:
    """Returns the model of 'hf:NAME' on the meta device, with its configuration as it came."""
    transformers = _transformers(name)
    config = _read_config(transformers, name)
    with bounded_build(name), torch.device("meta"), offline():
        head, _, _ = _choose_head(transformers, config, name)
        return getattr(transformers, head).from_config(config, dtype=torch.get_default_dtype())


def token_form(name: str, context: int | None) -> TokenForm | None:
    """Returns the form of the samples of 'hf:NAME' if it is a causal language model; takes no memory."""
    transformers = _transformers(name)
    config = _read_config(transformers, name)
    with bounded_build(name), torch.device("meta"), offline():
        head, objective, _ = _choose_head(transformers, config, name)
        if objective != "next":
            return None
        model = getattr(transformers, head).from_config(config, dtype=torch.get_default_dtype())
        form = _form(config, objective, MOST_TOKENS, context, _num_reserved(model))
    return form if isinstance(form, TokenForm) else None


def check_data(name: str, data: str | None, weights: str | None) -> None:
    """Raises InputError if pretrained weights come without a choice of data."""
    if weights is not None and data is None:
        raise InputError(
            f"'hf:{name}' begins with pretrained weights, and no data is named to train them on: by default that would"
            " be bytes of Python's standard library as token ids; name one with --data ('stdlib' for these), or return"
            " the model and your own samples from FILE.py:FUNCTION"
        )


def tokenizer_folder(name: str, weights: str | None = None) -> str:
    """Returns the folder with a model's tokenizer: that of its weights if it has one, else of its configuration."""
    folders = [Path(path) for path in (weights, name) if path is not None]
    folders = [path if path.is_dir() else path.parent for path in folders]
    return str(next((path for path in folders if (path / "tokenizer.json").is_file()), folders[-1]))


def check_tokenizer(choice: DataChoice, weights: str | None) -> None:
    """Raises InputError if pretrained weights come with one tokenizer and the data is to be read with another."""
    if weights is None or choice.path is None or choice.tokenizer is None:
        return
    folder = Path(weights) if Path(weights).is_dir() else Path(weights).parent
    if not (folder / "tokenizer.json").is_file():
        return
    own, chosen = FileTokenizer(folder / "tokenizer.json"), find_tokenizer(choice.tokenizer, None, is_zoo=False)
    if own.body_digest != chosen.body_digest:
        raise InputError(
            f"the weights '{weights}' were trained with the tokenizer in {folder}, of {own.vocabulary} token ids, and"
            f" --tokenizer {choice.tokenizer} is another one, of {chosen.vocabulary}; leave --tokenizer out"
        )


def read_config_text(name: str) -> bytes:
    """Returns the JSON of a configuration from its file or from the hub."""
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


def _read_config(transformers: Any, name: str) -> Any:
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    try:
        if path.suffix != ".json":
            check_source(name, "configuration")
            with hub_access():
                plain, _ = transformers.PreTrainedConfig.get_config_dict(name)
            check_configuration(plain, name)
            with hub_access():
                return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        plain = json.loads(read_file(path))
        check_configuration(plain, name)
        with offline():
            return transformers.AutoConfig.for_model(plain.pop("model_type"), **plain)
    except InputError:
        raise
    except KeyError as error:
        raise InputError(f"{path} has no {error}, which says what kind of model it is; add it") from None
    except Exception as error:
        text = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(f"cannot read the configuration 'hf:{name}': {text}") from None


def _read_model(transformers: Any, head: str, config: Any, weights: str) -> nn.Module:
    """Returns a model with weights that transformers reads; it also maps old names and checkpoints without a head."""
    check_source(weights, "weights")
    if Path(weights).is_dir():
        _check_files(Path(weights))
    options = {"config": config, "dtype": torch.get_default_dtype(), "use_safetensors": True}
    transformers.utils.logging.disable_progress_bar()  # every worker would show one
    try:
        with hub_access():
            model, report = getattr(transformers, head).from_pretrained(weights, **options, output_loading_info=True)
    except Exception as error:
        text = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(
            f"cannot read the weights '{weights}': {text}; give a file or folder of safetensors, or a name on the hub"
        ) from None
    finally:
        transformers.utils.logging.enable_progress_bar()
    missing = sorted(report["missing_keys"])
    if missing:
        raise InputError(
            f"'{weights}' has no '{missing[0]}'{f' and {len(missing) - 1} more' if len(missing) > 1 else ''} of a"
            f" {type(model).__name__}; give weights that have all of it"
        )
    loaded: nn.Module = model
    return loaded


def _check_files(folder: Path) -> None:
    """Raises InputError if a folder has a file that would block a reader, such as a FIFO."""
    for path in folder.iterdir():
        try:
            if not path.is_dir():
                check_file(path)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None


def _choose_head(transformers: Any, config: Any, name: str) -> tuple[str, str, tuple[str, ...]]:
    for head, objective, inputs in _HEADS:
        fits = type(config) in getattr(transformers, head)._model_mapping
        if fits and (objective != "reversed" or config.is_encoder_decoder):
            return head, objective, inputs
    raise InputError(
        f"'hf:{name}' is a {type(config).__name__}, which makes no language model and classifies no images; write a"
        " function that returns (model, loss, samples) and give FILE.py:FUNCTION"
    )


def _num_reserved(model: nn.Module) -> int:
    """Returns the number of position ids reserved before the first token's, as RoBERTa does for padding."""
    tables = [part for name, part in model.named_modules() if name.endswith("position_embeddings")]
    return max((1 + index for part in tables if (index := getattr(part, "padding_idx", None)) is not None), default=0)


def _form(config: Any, objective: Any, most: int, context: int | None, num_reserved: int) -> Form:
    """Returns the form of the samples that a configuration takes."""
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
    """Data whose inputs are keyword arguments of the model."""

    def __init__(self, source: Dataset, names: Sequence[str]):
        self.source, self.names = source, names

    def __len__(self) -> int:
        return len(self.source)

    def batch(self, indices: Tensor | Sequence[int]) -> tuple[Any, Any]:
        """Returns (keyword arguments, targets)."""
        inputs, targets = self.source.batch(indices)
        values = inputs if isinstance(inputs, tuple) else (inputs,)
        names = self.names if len(values) == len(self.names) else (*self.names, _POSITIONS)
        return dict(zip(names, values, strict=True)), targets


def logits_cross_entropy(output: Any, targets: Any) -> Tensor:
    """Returns the sum over all targets that count, from an output of transformers."""
    return cross_entropy(output.logits, targets)
