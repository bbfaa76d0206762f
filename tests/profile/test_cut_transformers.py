"""Models of Hugging Face's transformers, from tiny configurations, cut as they come."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from pipedejavu.profile import cut_model
from tests.profile.case import compare, own_loss, run

SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
T5 |= {"decoder_start_token_id": 0, "use_cache": False}
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 3, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VIT = {key: SMALL[key] for key in SMALL if key != "vocab_size"} | {"image_size": 16, "patch_size": 4}


def untied(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model


MODELS = {
    "gpt2": (
        lambda t: t.GPT2LMHeadModel(t.GPT2Config(**GPT2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)),
        ["transformer.wte", *(f"transformer.h.{n}" for n in range(3)), "transformer.ln_f"],
    ),
    "llama": (
        lambda t: t.LlamaForCausalLM(t.LlamaConfig(**SMALL, num_key_value_heads=1, use_cache=False)),
        ["model.embed_tokens", *(f"model.layers.{n}" for n in range(3)), "model.norm"],
    ),
    "bert": (
        lambda t: t.BertForMaskedLM(t.BertConfig(**SMALL, **CALM)),
        [
            "bert.embeddings.word_embeddings",
            *(f"bert.encoder.layer.{n}" for n in range(3)),
            "cls.predictions.transform.dense",
        ],
    ),
    "t5": (
        lambda t: untied(t.T5ForConditionalGeneration(t.T5Config(**T5))),
        None,
    ),
    "vit": (
        lambda t: t.ViTForImageClassification(t.ViTConfig(**VIT, **CALM)),
        None,
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_pieces_equal_the_whole_bit_for_bit(name: str) -> None:
    torch.manual_seed(0)
    build, names = MODELS[name]
    inputs = {"input_ids": torch.randint(64, (2, 8)), "labels": torch.randint(64, (2, 8))}
    if name == "vit":
        inputs = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    cut, found = compare(build(transformers), inputs)
    assert cut.method == "blocks"
    assert len(cut.units) >= 5
    assert names is None or [unit for unit, _ in cut.units] == names
    assert [difference for difference in found if not difference.is_none] == []


@pytest.mark.filterwarnings("ignore")
def test_only_a_weight_that_is_used_three_times_depends_on_the_order_of_its_sum() -> None:
    """The embedding of T5 is that of its encoder, of its decoder, and its head."""
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))
    _, found = compare(model, {"input_ids": torch.randint(64, (2, 8)), "labels": torch.randint(64, (2, 8))})
    assert not any(difference.outputs or difference.loss for difference in found)
    assert {name for difference in found for name in difference.gradients} <= {"shared.weight"}


def tokens(**others):
    return {"input_ids": torch.randint(64, (2, 8)), "labels": torch.randint(64, (2, 8)), **others}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_no_causal_mask_is_handed_on(name: str) -> None:
    cut = cut_model(MODELS[name][0](transformers), tokens())
    assert not [entry for _, unit in cut.units for entry in unit.bodies[0].entries if len(entry.shape) == 4]


@pytest.mark.filterwarnings("ignore")
def test_padding_that_is_given_is_masked_as_in_the_whole() -> None:
    torch.manual_seed(0)
    padding = torch.ones(2, 8, dtype=torch.int64)
    padding[1, 5:] = 0
    _, found = compare(MODELS["llama"][0](transformers), tokens(attention_mask=padding))
    assert [difference for difference in found if not difference.is_none] == []


@pytest.mark.filterwarnings("ignore")
def test_only_with_a_mask_that_masks_nothing_shared_heads_depend_on_the_order_of_their_sum() -> None:
    """The whole model looks into the mask and leaves it out, and its kernel then adds up what shares a head."""
    torch.manual_seed(0)
    model, inputs = (
        MODELS["llama"][0](transformers).double(),
        tokens(attention_mask=torch.ones(2, 8, dtype=torch.int64)),
    )
    cut, found = compare(model, inputs)
    assert not any(difference.outputs or difference.loss for difference in found)
    model(**inputs).loss.backward()
    gradients = run(cut, inputs, own_loss, 1)[2]
    for name, parameter in model.named_parameters():
        # No sum has more terms than the vocabulary has tokens, 64, each with half a unit in the last place.
        assert torch.allclose(gradients[name], parameter.grad, rtol=0, atol=64 * 2**-53 * parameter.grad.abs().max())
