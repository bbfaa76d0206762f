"""A run on a Hugging Face folder leaves a folder that `from_pretrained` opens, with the trained weights."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file

from pipedejavu.facts import InputError
from pipedejavu.source.hf_folder import write_pretrained
from pipedejavu.source.initial_weights import describe_dtype
from tests.cli.test_main import run

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 260, "max_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture(params=["Qwen2", pytest.param("Llama", marks=pytest.mark.slow)])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**SIZES, tie_word_embeddings=request.param == "Qwen2")
    model = getattr(transformers, f"{request.param}ForCausalLM")(config)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    return tmp_path / "base"


def test_the_reopened_model_computes_what_the_trained_one_does(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    said = run(
        "train", f"hf:{folder}", "--weights", str(folder), "--data", "stdlib", "--plan", "preset:ddp", "--workers", "1",
        "--samples", "2", "--steps", "2", "--json", "--run-dir", str(out),
    )  # fmt: skip
    opened = Path(json.loads(said.stdout)["pretrained"])
    assert opened == out / "pretrained"
    model, report = transformers.AutoModelForCausalLM.from_pretrained(opened, output_loading_info=True)
    assert not report["missing_keys"]
    assert (opened / "tokenizer.json").read_text() == "{}"
    assert model.config.use_cache
    trained = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    trained.load_state_dict(load_file(out / "model.safetensors"), strict=False)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in trained.state_dict().items())
    tokens = torch.arange(12).reshape(1, 12)
    assert model.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, trained(tokens).logits)


def test_weights_in_half_precision_are_said_to_be_trained_in_float32(folder: Path) -> None:
    assert describe_dtype(str(folder), "float32") == (
        f"the weights in {folder} are bfloat16; they are loaded into float32 parameters, which the run trains"
    )
    assert describe_dtype("owner/name", "float32") == ""


def test_weights_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"other": torch.zeros(1)}, tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=r"w.safetensors has no '[a-z._]+' of"):
        write_pretrained(str(folder), tmp_path / "w.safetensors", tmp_path / "out")
