"""Adapters and frozen parts: what is trained, what is merged, and what peft reads back."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import nn

from pipedejavu.facts import InputError
from pipedejavu.source.model_source import open_task
from pipedejavu.source.trained_part import TrainedPart, freeze_rest, merge_adapters, write_adapter

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 260, "max_position_embeddings": 16, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def opened(folder, **part):
    part = TrainedPart(**part)
    return open_task(f"hf:{folder}", data="stdlib", weights=str(folder), part=part).model


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft asks transformers for it
def test_adapters_are_merged_exactly_and_read_by_peft(folder, tmp_path):
    peft = pytest.importorskip("peft")
    model = opened(folder, lora=4)
    names = trained(model)
    assert names == {name for name, _ in model.named_parameters() if ".lora_" in name}
    assert len(names) == 2 * 7 * 3
    assert not any("lm_head" in name for name in names)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.normal_(0, 0.1)
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
    state = dict(model.state_dict())
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert not plain.load_state_dict(merge_adapters(state), strict=False).unexpected_keys
    write_adapter(state, 4, str(folder), tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    with torch.no_grad():
        assert torch.allclose(plain(tokens).logits, expected, atol=1e-5)
        assert torch.allclose(adapted(tokens).logits, expected, atol=1e-6)
        before = transformers.AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    assert not torch.allclose(before, expected, atol=1e-3)


def test_the_last_blocks_are_trained_with_what_follows_them(folder):
    names = trained(opened(folder, patterns="last:1"))
    assert "model.norm.weight" in names
    assert {name.split(".")[2] for name in names if ".layers." in name} == {"2"}
    assert "model.embed_tokens.weight" not in names  # tied to the head
    assert trained(opened(folder, patterns="*.norm.weight, *.q_proj.*")) == {
        "model.norm.weight",
        *(f"model.layers.{n}.self_attn.q_proj.{end}" for n in range(3) for end in ("weight", "bias")),
    }  # fmt: skip


def test_what_cannot_be_trained_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"--train last:4 asks for 4 blocks, and '' has 3; give as many"):
        freeze_rest(model, TrainedPart(patterns="last:4"))
    with pytest.raises(InputError, match=r"'2\.wieght', which no parameter matches; did you mean '2\.weight'"):
        freeze_rest(model, TrainedPart(patterns="2.wieght"))
    with pytest.raises(InputError, match="--lora trains adapters only, and --train names parameters of the model"):
        freeze_rest(model, TrainedPart(patterns="2.*", lora=2))
    with pytest.raises(InputError, match="--train last:N needs a model with a list of blocks"):
        freeze_rest(nn.Linear(2, 2), TrainedPart(patterns="last:1"))
    pytest.importorskip("peft")
    with pytest.raises(InputError, match="--lora adapts linear layers, and a Embedding has none"):
        freeze_rest(nn.Embedding(2, 2), TrainedPart(lora=2))
