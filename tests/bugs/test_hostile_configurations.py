"""Configurations of transformers from strangers: no code is fetched or run, and what cannot be built is a sentence."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from pipedejavu.data.data_choice import DataChoice
from pipedejavu.facts import InputError
from pipedejavu.source.hf_model import build_hf_model

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers says of odd fields is not ours

GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 16, "vocab_size": 11}


def build(folder: Path, **changes: Any) -> Any:
    path = folder / "config.json"
    path.write_text(json.dumps({**GPT2, **changes}))
    return build_hf_model(str(path), choice=DataChoice(name="random"))


def test_a_sound_one_is_built_with_what_it_may_ask_for(tmp_path: Path) -> None:
    fields = {
        "attn_implementation": "eager",
        "block_size": 10**6,
        "quantization_config": None,
        "architectures": ["Own"],
    }
    task = build(tmp_path, **fields)
    assert task.model.config.n_embd == 8


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attn_implementation", "someone/kernel"),
        ("_attn_implementation", "someone/kernel@main:f"),
        ("_attn_implementation_internal", "someone/kernel"),
        ("attn_implementation", {"": "someone/kernel"}),
        ("attn_implementation", "flash_attention_2"),  # falls back to a kernel of the hub
        ("experts_implementation", "someone/kernel"),
        ("auto_map", {"AutoModelForCausalLM": "someone/code--modeling.Model"}),
        ("trust_remote_code", True),
        ("custom_pipelines", {"text-generation": {"impl": "own.Pipeline"}}),
        ("quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ("backbone", "someone/backbone"),
        ("use_pretrained_backbone", True),
        ("architecture", "hf-hub:someone/model"),
        ("text_config", {"model_type": "gpt2", "attn_implementation": "someone/kernel"}),
    ],
)
def test_what_would_fetch_or_run_code_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(InputError, match=r"(fetch|stands for) .*code|fetch another model"):
        build(tmp_path, **{field: value})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"n_embd": 9}, "cannot build a model of the configuration.*divisible"),
        ({"n_layer": 10**9}, "models of up to 4096 layers"),
        ({"n_layer": "many"}, "cannot"),
        ({"n_head": 0}, "cannot"),
        ({"vocab_size": -5}, "cannot"),
        ({"vocab_size": 10**12}, "cannot|takes more than"),
        ({"vocab_size": None}, "cannot"),
        ({"activation_function": "nonsense"}, "cannot"),
        ({"model_type": ["gpt2"]}, "cannot"),
        ({"model_type": "no such"}, "cannot"),
        ({"to_dict": 1}, "cannot"),
        ({"resid_pdrop": 7}, "cannot"),
    ],
)
def test_what_cannot_be_built_is_a_sentence(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        build(tmp_path, **changes)


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "null", "{", '{"a": 1}', "[" * 5000, '{"a":' * 5000, "\0", '"\\ud800"']
)
def test_what_is_no_configuration_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError):
        build_hf_model(str(tmp_path))


def test_a_fifo_among_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="is a FIFO"):
        build_hf_model(str(tmp_path), choice=DataChoice(name="stdlib"), weights=str(tmp_path))
