"""Pretrained weights with data in files: tokens are those that the weights were trained with, or the run is refused."""

import json

import pytest

pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")

from pipedejavu.data.data_choice import DataChoice
from pipedejavu.facts import InputError
from pipedejavu.source.hf_model import check_tokenizer
from pipedejavu.source.model_source import open_task


def write_tokenizer(folder, words: str):
    folder.mkdir()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: n for n, w in enumerate(words.split())}, "[UNK]"))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder


def test_another_tokenizer_than_that_of_the_weights_is_refused(tmp_path) -> None:
    weights = write_tokenizer(tmp_path / "weights", "[UNK] <end> one two")
    other = write_tokenizer(tmp_path / "other", "[UNK] <end> two one three")
    same = write_tokenizer(tmp_path / "same", "[UNK] <end> one two")
    (tmp_path / "data.txt").write_text("one two")
    choice = DataChoice(name=str(tmp_path / "data.txt"), tokenizer=str(other))
    with pytest.raises(
        InputError, match=r"were trained with the tokenizer in .*weights, of 4 token ids, and --tokenizer"
    ):
        check_tokenizer(choice, str(weights))
    with pytest.raises(InputError, match=r"other is another one, of 5; leave --tokenizer out"):
        check_tokenizer(choice, str(weights / "model.safetensors"))
    check_tokenizer(choice.replace(tokenizer=str(same)), str(weights))
    check_tokenizer(choice, None)


def test_a_context_for_a_model_of_ones_own_is_refused(tmp_path) -> None:
    (tmp_path / "own.py").write_text("def model(): raise AssertionError('built')")
    with pytest.raises(InputError, match=r"--context is for hf: and zoo: models; '.*own.py:model' brings sequences of"):
        open_task(f"{tmp_path / 'own.py'}:model", context=64)
