"""What a trained language model says: a prompt, or the first held-out chat, continued by the folder of the result."""

from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from pipedejavu.data.data_source import open_held_out
from pipedejavu.facts import InputError
from pipedejavu.run.options import TrainOptions
from pipedejavu.source.chosen_data import data_choice
from pipedejavu.source.document_probe import separates_documents
from pipedejavu.source.hf_config import offline
from pipedejavu.source.hf_folder import without_progress_bars
from pipedejavu.source.hf_model import token_form, tokenizer_folder
from pipedejavu.zoo.loss import IGNORED

MOST_NEW = 64
"""Tokens that are generated."""
MOST_BEGUN = 16
"""Tokens of a held-out text that the model continues."""


class Generated(NamedTuple):
    """A prompt and its continuation."""

    prompt: str
    text: str


def generate_sample(options: TrainOptions, folder: Path) -> Generated | None:
    """Continues `options.sample`, or else the first held-out prompt or the beginning of the first held-out text.

    Returns None if there is neither, or no tokenizer.
    A tokenizer with a chat template takes the sample as a user's message. The most likely token is taken each time.
    """
    if not (folder / "tokenizer.json").is_file():
        if options.sample is not None:
            raise InputError(f"{folder} has no tokenizer.json, so --sample cannot be read; give one with --tokenizer")
        return None
    transformers = import_module("transformers")
    with offline():
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    if options.sample is None and data_choice(options).for_evaluation() is None:
        return None
    with offline(), without_progress_bars():
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.eval()
    ids = _held_out_prompt(options, model) if options.sample is None else _read_prompt(tokenizer, options)
    if ids is None:
        return None
    with torch.no_grad():
        tokens = torch.tensor([ids])
        output = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=MOST_NEW, do_sample=False,
            pad_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
    text = tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
    return Generated(tokenizer.decode(ids, skip_special_tokens=False), text)


def _read_prompt(tokenizer: Any, options: TrainOptions) -> list[int]:
    assert options.sample is not None
    if not tokenizer.chat_template:
        return [*tokenizer(options.sample, add_special_tokens=False)["input_ids"]]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": options.sample}], add_generation_prompt=True, tokenize=False
    )
    return [*tokenizer(text, add_special_tokens=False)["input_ids"]]


def _held_out_prompt(options: TrainOptions, model: nn.Module) -> list[int] | None:
    """Returns the tokens before the first answer of the first held-out record, or the first tokens of a text."""
    name, separates = options.model.removeprefix("hf:"), cache(partial(separates_documents, model))
    form = token_form(name, options.context)
    if form is None:
        return None
    folder = tokenizer_folder(name, options.weights)
    data = open_held_out(
        data_choice(options), form, default="stdlib", seed=options.seed, model_folder=folder, is_zoo=False,
        separates=separates,
    )  # fmt: skip
    if data is None:
        return None
    inputs, targets = data.batch([0])
    ids = inputs[0] if isinstance(inputs, tuple) else inputs  # several documents in a row come with positions
    first = int((targets[0] != IGNORED).nonzero()[0])
    if not first:  # a text
        return [int(token) for token in ids[0, : min(MOST_BEGUN, ids.shape[1])]]
    return [int(token) for token in ids[0, : first + 1]]
