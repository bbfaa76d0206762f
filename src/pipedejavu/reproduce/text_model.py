"""A BERT and an encoder-decoder: those of transformers from a configuration if it is installed, else the zoo's."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pipedejavu.reproduce.experiment import Setting

Kind = Literal["bert", "bart"]
_ZOO: dict[Kind, str] = {"bert": "bert", "bart": "seq2seq"}
_SMALL, _MIDDLE = (2, 32, 2, 16), (4, 128, 4, 64)
"""Layers, width, heads and context."""


class TextModel(NamedTuple):
    """A model as a study opens it, and the sentence that says where it is from."""

    model: str
    options: dict[str, Any]
    note: str


def choose_text_model(setting: Setting, kind: Kind, folder: Path) -> TextModel:
    """Returns a model of the scale's size; writes its configuration into the folder if transformers reads one."""
    shape = setting.pick(_SMALL, _MIDDLE, None)
    if find_spec("transformers") is None:
        name = _ZOO[kind]
        model = f"{name}-tiny" if shape else f"{name}-base"
        options = dict(zip(("layers", "width", "heads", "context"), shape, strict=True)) if shape else {}
        return TextModel(model, options, f"transformers is not installed, so the model is the zoo's {model}.")
    path = folder / f"{kind}.json"
    path.write_text(json.dumps(_configuration(kind, shape)))
    note = f"The model is transformers' {kind}, from a configuration, without dropout, so that plans can be compared."
    return TextModel(f"hf:{path}", {"context": shape[-1] if shape else 128}, note)


def _configuration(kind: Kind, shape: tuple[int, int, int, int] | None) -> dict[str, Any]:
    """Returns a configuration without dropout, of the published size if no shape is given."""
    rates = {
        "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
        "bart": ("dropout", "attention_dropout", "activation_dropout"),
    }
    form: dict[str, Any] = {"model_type": kind, **dict.fromkeys(rates[kind], 0.0)}
    if shape is None:
        return form | ({"d_model": 768, "encoder_layers": 6, "decoder_layers": 6} if kind == "bart" else {})
    layers, width, heads, context = shape
    form |= {"vocab_size": 512, "max_position_embeddings": context}
    if kind == "bert":
        sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
        return form | sizes | {"intermediate_size": 4 * width}
    each = {"layers": layers // 2, "attention_heads": heads, "ffn_dim": 4 * width}
    return form | {"d_model": width} | {f"{p}_{n}": v for p in ("encoder", "decoder") for n, v in each.items()}
