"""Rows of several documents: which models of transformers compute each document as if it were alone."""

import json
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from pipedejavu.data.data_choice import DataChoice
from pipedejavu.profile import cut_model
from pipedejavu.source.document_probe import separates_documents
from pipedejavu.source.model_source import open_task

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(**settings):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=60, **SHAPE, **settings))


def qwen(**settings):
    settings = {"num_key_value_heads": 2, **SHAPE, **settings}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(vocab_size=60, **settings))


def gpt2(attention_dropout=0.1):
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    ends |= {f"{part}_pdrop": attention_dropout for part in ("attn", "resid", "embd")}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=4, **ends))


def opt():
    size = {"hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32, "num_hidden_layers": 2}
    return transformers.OPTForCausalLM(transformers.OPTConfig(vocab_size=60, num_attention_heads=4, **size))


def mamba():
    return transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=60, hidden_size=32, num_hidden_layers=2))


@pytest.mark.parametrize(("make", "separates"), [(llama, True), (qwen, True), (gpt2, True), (opt, False)])
def test_the_models_that_separate_documents_are_told_from_those_that_do_not(make, separates) -> None:
    torch.manual_seed(0)
    assert separates_documents(make()) is separates


def test_a_model_that_takes_no_positions_is_not_run() -> None:
    model = mamba()
    model.forward = lambda tokens: pytest.fail(f"was run on {tokens}")
    assert not separates_documents(model)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model with the tokenizer of its words, and a text per line of a file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "<end>": 1, **{f"w{n}": n for n in range(2, 60)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    lines = [[f"w{2 + (7 * n + 3 * k) % 58}" for k in range(2 + n % 9)] for n in range(40)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": " ".join(line)}) + "\n" for line in lines))
    return tmp_path


def test_a_packed_row_has_the_loss_and_the_gradients_of_its_documents_alone(folder) -> None:
    """In float64, whole and cut into units, which are traced."""
    torch.set_default_dtype(torch.float64)
    try:
        config = transformers.LlamaConfig(vocab_size=60, max_position_embeddings=32, **SHAPE)
        config.save_pretrained(folder)
        choice = DataChoice(name=str(folder / "data.jsonl"), context=16)
        task = open_task(f"hf:{folder}", data=choice)
        inputs, targets = task.data.batch(range(4))
        assert sorted(inputs) == ["input_ids", "position_ids"]
        cut = cut_model(task.model, inputs)
        runs = {"whole": lambda: task.model(**inputs), "cut": lambda: run_units(cut, inputs)}
        found = {name: gradients(task, task.loss(run(), targets)) for name, run in runs.items()}
        documents = split(inputs, targets)
        assert len(documents) > 8
        alone = gradients(
            task, sum(task.loss(task.model(input_ids=ids[None]), labels[None]) for ids, labels in documents)
        )
        for loss, grads in found.values():
            assert loss == pytest.approx(alone[0], rel=1e-12)
            assert all(torch.allclose(grads[name], alone[1][name], rtol=0, atol=1e-12) for name in grads)
        crossing = open_task(f"hf:{folder}", data=choice.replace(packing="stream"))
        ids, _ = crossing.data.batch(range(4))
        assert [*ids] == ["input_ids"]
        assert torch.equal(ids["input_ids"], inputs["input_ids"])  # the same tokens, and another loss
        assert abs(task.loss(task.model(**ids), targets).item() - alone[0]) > 1e-6
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("make", [llama, qwen, gpt2])
def test_packed_chats_have_the_loss_and_the_gradients_of_each_chat_alone(folder, make) -> None:
    """Models as they come, in float64, whole and cut into units; each chat alone is masked by hand."""
    torch.set_default_dtype(torch.float64)
    try:
        model = make(attention_dropout=0.0)
        model.config.save_pretrained(folder)
        chats = [([2 + n % 5] * (1 + n % 4), [7 + (n * k) % 50 for k in range(1, 2 + n % 6)]) for n in range(12)]
        lines = [{"prompt": words(asked) + " ", "completion": words(answer)} for asked, answer in chats]
        (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        task = open_task(f"hf:{folder}", data=DataChoice(name=str(folder / "data.jsonl"), context=16))
        assert len(task.data) < len(chats)
        inputs, targets = task.data.batch(range(len(task.data)))
        cut = cut_model(task.model, inputs)
        runs = {"whole": lambda: task.model(**inputs), "cut": lambda: run_units(cut, inputs)}
        packed = {name: gradients(task, task.loss(run(), targets)) for name, run in runs.items()}
        alone = gradients(task, sum(loss_alone(task.model, *chat) for chat in chats))
        for loss, grads in packed.values():
            assert loss == pytest.approx(alone[0], rel=1e-12)
            assert all(torch.allclose(grads[name], alone[1][name], rtol=0, atol=1e-12) for name in grads)
        assert task.count(targets) == sum(len(answer) + 1 for _, answer in chats)
    finally:
        torch.set_default_dtype(torch.float32)


def words(ids):
    return " ".join(f"w{n}" for n in ids)


def loss_alone(model, asked, answer):
    """Returns the sum over the answer's tokens and the end token, as a user would compute it for one chat."""
    ids = torch.tensor([[*asked, *answer, 1]])
    logits = model(input_ids=ids).logits[0, len(asked) - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, ids[0, len(asked) :], reduction="sum")


def run_units(cut, inputs):
    value = cut.flat(inputs)
    for _, unit in cut.units:
        value = unit(value)
    return cut.output(value)


def gradients(task, loss):
    task.model.zero_grad()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in task.model.named_parameters()}


def split(inputs, targets):
    """Returns the documents of rows, each with its targets."""
    documents = []
    for ids, positions, labels in zip(inputs["input_ids"], inputs["position_ids"], targets, strict=True):
        begins = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        documents += [(ids[a:b], labels[a:b]) for a, b in pairwise(begins)]
    return documents
