"""What people write in their own loops: clipped gradients, other optimizers, models of transformers as they come."""

import copy
import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from torch import nn

import pipedejavu as pdv
from pipedejavu.facts import InputError

ROUNDING = 1e-12
FLOAT32_LOSS = 1e-6
"""Models of transformers compute their loss in float32, so gradients differ by a few roundings of 6e-8."""


def furthest(model: nn.Module, other: nn.Module) -> float:
    state, others = model.state_dict(), other.state_dict()
    return max(float((state[name] - others[name]).abs().max()) for name in others)


@pytest.mark.parametrize("plan", ["1f1b", "ddp"])
def test_a_norm_clips_gradients_as_in_a_plain_loop(plan) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    plain, inputs, targets = copy.deepcopy(model), torch.randn(16, 6).double(), torch.randint(0, 3, (16,))
    settings = {"lr": 0.5, "momentum": 0.9}
    trainer = pdv.Trainer(
        model, torch.optim.SGD(model.parameters(), **settings), nn.CrossEntropyLoss(), plan=plan, clip_norm=0.05
    )
    optimizer = torch.optim.SGD(plain.parameters(), **settings)
    norms = []
    for _ in range(4):
        trainer.step((inputs, targets))
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(inputs), targets).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.05).item())
        optimizer.step()
    assert min(norms) > 0.05
    assert furthest(model, plain) < 1e-6  # torch divides by norm + 1e-6; 4 steps of 0.5 · 0.05 move weights by 0.2


def test_batches_are_whole_or_shares() -> None:
    with pytest.raises(InputError, match=r"^batches is 'own'; give one of 'auto', 'global', 'shard'$"):
        pdv.Trainer(nn.Linear(2, 2), batches="own")


@pytest.mark.parametrize("form", ["generator", "list"])
def test_the_hybrid_optimizer_asks_for_the_model(form) -> None:
    parameters = nn.Linear(2, 2).parameters()
    sentence = (
        "HybridAdamW takes the model, whose forward it hooks to bring weights in time, and is given a"
        f" {form}; write HybridAdamW(model, lr=...), or HybridAdamW(model, params, lr=...) for groups or some of its"
        " parameters"
    )
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        pdv.HybridAdamW(parameters if form == "generator" else list(parameters), lr=1e-3)


def llama(**options: object) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def texts(**more: object) -> dict[str, object]:
    tokens = torch.randint(0, 40, (10, 12), generator=torch.Generator().manual_seed(2))
    labels = tokens.clone()
    labels[:4, :7] = -100
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels, **more}


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_llama_trains_with_its_cache_on(is_tied) -> None:
    model = llama(tie_word_embeddings=is_tied)
    assert model.config.use_cache
    plain = copy.deepcopy(model)
    trainer = pdv.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        loss = trainer.step(texts())
        optimizer.zero_grad()
        expected = plain(**texts()).loss
        expected.backward()
        optimizer.step()
        assert abs(loss - expected.item()) < FLOAT32_LOSS
    assert model.config.use_cache
    assert furthest(model, plain) < FLOAT32_LOSS
    metrics, plain = trainer.evaluate([texts()]), plain.eval()
    with torch.no_grad():
        assert abs(metrics["loss"] - plain(**texts()).loss.item()) < FLOAT32_LOSS
    assert metrics["perplexity"] == pytest.approx(torch.tensor(metrics["loss"]).exp().item(), rel=FLOAT32_LOSS)


def test_the_number_of_items_of_a_batch_divides_its_loss() -> None:
    model = llama()
    plain = copy.deepcopy(model)
    trainer = pdv.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for items in (82, torch.tensor(120)):  # the labels that count, and more, as when this is a part of a batch
        loss = trainer.step(texts(num_items_in_batch=items))
        optimizer.zero_grad()
        expected = plain(**texts(num_items_in_batch=items)).loss
        expected.backward()
        optimizer.step()
        assert abs(loss - expected.item()) < FLOAT32_LOSS
    assert furthest(model, plain) < FLOAT32_LOSS


def test_a_saved_folder_opens_with_from_pretrained_and_goes_on(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    model = llama()
    trainer = pdv.Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(2):
        trainer.step(texts())
        trainer.save(tmp_path)
    trainer.wait()
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert furthest(opened, model) == 0
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]
    other = llama()
    again = pdv.Trainer(other, torch.optim.AdamW(other.parameters(), lr=1e-3))
    assert again.load(tmp_path) == 2
    assert again.step(texts()) == trainer.step(texts())
    assert furthest(other, model) == 0


def test_a_tokenizer_that_cannot_be_saved_is_refused(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    trainer = pdv.Trainer(model, loss=nn.MSELoss())
    trainer.step((torch.randn(8, 2), torch.randn(8, 2)))
    with pytest.raises(InputError, match=r"^tokenizer is a str without save_pretrained\(\); give a tokenizer or"):
        trainer.save(tmp_path, tokenizer="gpt2")
