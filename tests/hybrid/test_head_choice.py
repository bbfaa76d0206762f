"""The head of a model in chunks under HybridAdamW: as asked, if its logits break the budget, and not otherwise."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipedejavu.facts import InputError
from pipedejavu.hybrid import HybridAdamW, head_choice
from pipedejavu.hybrid.head_choice import HeadChoice
from pipedejavu.hybrid.placement import Limits, MemoryInterval, UnitSize, choose_placement
from pipedejavu.hybrid.state_placer import StatePlacer
from pipedejavu.runtime import deferred_logits

WORDS, WIDTH = 64, 8


class Model(nn.Module):
    """An embedding, two blocks and a head, tied or not."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)) for _ in "ab")
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        if is_tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        logits: Tensor = self.lm_head(x)
        return logits


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    labels = tokens.roll(-1, 1).masked_fill(tokens % 5 == 0, -100)
    return cross_entropy(logits.float().view(-1, WORDS), labels.view(-1))


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the number of chunks of each loss that ran in chunks."""
    taken: list[int] = []
    run = deferred_logits.chunked_cross_entropy

    def note(*args: Any, **kwargs: Any) -> Tensor:
        taken.append(kwargs["num_chunks"])
        return run(*args, **kwargs)

    monkeypatch.setattr(deferred_logits, "chunked_cross_entropy", note)
    return taken


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (4, 6), generator=generator) for _ in range(count)]


def train(optimizer: Any, model: nn.Module, *, accumulate: int = 1, reads: bool = False) -> list[float]:
    losses = []
    for n, tokens in enumerate(batches(3 * accumulate)):
        logits = model(tokens)
        loss = loss_of(logits, tokens)
        (loss / accumulate).backward()
        losses.append(loss.item())
        if reads:
            logits.argmax(-1)
        if (n + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def built(*, is_tied: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(is_tied=is_tied)


def hybrid(model: nn.Module, **options: Any) -> HybridAdamW:
    return HybridAdamW(model, lr=0.01, **options)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"head_chunks": 4},
        {"activations": {"lm_head": "chunk"}},
        {"head_chunks": 4, "activations": {"lm_head": "chunk"}},
    ],
)
def test_training_in_chunks_equals_a_plain_loop(
    options: dict[str, Any], accumulate: int, is_tied: bool, chunks: list[int]
) -> None:
    plain, model = built(is_tied=is_tied), built(is_tied=is_tied)
    expected = train(torch.optim.AdamW(plain.parameters(), lr=0.01), plain, accumulate=accumulate)
    optimizer = hybrid(model, microbatches=accumulate, clip_norm=None, **options)
    assert train(optimizer, model, accumulate=accumulate) == pytest.approx(expected, rel=1e-6)
    optimizer.synchronize()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert chunks == [options.get("head_chunks", 2)] * (3 * accumulate)
    assert optimizer.plan is not None
    assert "the head 'lm_head' runs in" in optimizer.plan.reasons[-1]
    optimizer.close()
    assert "forward" not in vars(model.lm_head)


def test_by_default_small_logits_stay_whole_and_the_model_as_it_was(chunks: list[int]) -> None:
    plain, model = built(), built()
    expected = train(torch.optim.AdamW(plain.parameters(), lr=0.01), plain)
    optimizer = hybrid(model)
    assert train(optimizer, model) == expected
    assert not chunks
    assert "forward" not in vars(model.lm_head)
    optimizer.close()


def test_logits_above_the_budget_are_divided_in_the_first_step(
    chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_choice, "LEAST_CHUNK_BYTES", 10_000)
    model = built()
    needed = 4 * 6 * WORDS * 16
    optimizer = hybrid(model, gpu_budget=needed - 1)
    train(optimizer, model)
    assert chunks == [3, 3, 3]  # of 24,576 bytes, at most 10,000 each
    assert optimizer.plan is not None
    text = "the head runs in 3 chunks: its logits would take 24.0 KiB at once, beside 0 B at that time, of 24.0 KiB"
    assert optimizer.plan.reasons[-1] == text
    optimizer.close()


def test_logits_that_are_read_stay_whole(chunks: list[int]) -> None:
    model = built()
    optimizer = hybrid(model)
    train(optimizer, model, reads=True)
    assert not chunks
    optimizer.close()


def test_evaluation_runs_the_plain_head(chunks: list[int]) -> None:
    model = built()
    optimizer = hybrid(model, head_chunks=4)
    train(optimizer, model)
    with torch.no_grad():
        logits = model(batches(1)[0])
    assert type(logits) is Tensor
    optimizer.close()


def test_a_recording_computes_no_logits_and_sees_the_backward_begin(chunks: list[int]) -> None:
    model = built()
    optimizer = hybrid(model, head_chunks=4)
    train(optimizer, model)
    del chunks[:]
    recorder = optimizer.record()
    train(optimizer, model)
    spans = recorder.finish()
    last = optimizer.scheduler.unit_states[-1].index
    assert chunks == [4, 4, 4]
    assert [action for _, action, *_ in spans].count(f"B{last}") == 3
    optimizer.close()


def test_logits_read_after_the_step_are_refused() -> None:
    model, tokens = built(), batches(1)[0]
    optimizer = hybrid(model, head_chunks=4)
    logits = model(tokens)
    loss_of(logits, tokens).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"read them before optimizer.step\(\), or give head_chunks=1"):
        logits.argmax(-1)
    optimizer.close()


def test_state_moves_to_the_gpu_if_chunks_make_room() -> None:
    """The first step's logits leave no room for the second unit's state; in chunks they do."""
    module, optimizer = built(), hybrid(built())
    intervals = [MemoryInterval(unit=1, peak_bytes=20 << 30), MemoryInterval(unit=0, peak_bytes=1 << 30)]
    meter: Any = SimpleNamespace(intervals=intervals, forwards=[], tensor_bytes=lambda: 100 << 30)
    choice = HeadChoice(module, _states(module), "auto", (), meter)
    (_, use) = choice._uses["lm_head"]
    use.num_losses, use.num_logits, use.itemsize, use.num_classes, use.width = 1, 10**9, 2, WORDS, WIDTH
    size = dict.fromkeys(
        ("weight_bytes", "gradient_bytes", "gpu_bytes", "host_bytes", "no_copy_bytes", "streamed_bytes"), 4 << 30
    )
    units = [UnitSize(name=n, num_parameters=1, shadow_bytes=0, **size) for n in "ab"]
    limits = Limits(gpu_bytes=30 << 30, host_bytes=100 << 30, keeps_gradients=False)
    whole = choose_placement(units, intervals, limits)
    state: Any = SimpleNamespace(sizes=units)
    placer = StatePlacer(state, optimizer.scheduler.lanes, meter, optimizer.scheduler.options, choice)
    plan = placer._place(placer._divide_heads(limits), limits)
    assert plan.places.count("gpu") > whole.places.count("gpu")
    # 16 bytes for each of 10^9 logits, of which each chunk may have 2 % of 100 GiB.
    assert use.num_chunks == 8
    assert "the head runs in 8 chunks: all its logits at once would take 7.5 GiB more of the GPU" in choice.reasons[-1]
    choice.release()
    optimizer.close()


def _states(model: Model) -> Any:
    optimizer = hybrid(built())
    states = optimizer.scheduler.unit_states
    optimizer.close()
    for state in states:
        state.unit.module = dict(model.named_modules())[state.unit.name]
    return states


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"head_chunks": 0}, "head_chunks is 0; give 1 or more chunks of tokens, or 'auto'"),
        ({"head_chunks": "many"}, "head_chunks is 'many'; give 1 or more chunks of tokens, or 'auto'"),
        (
            {"activations": {"layers.0": "chunk"}},
            "activations of 'layers.0' is 'chunk', and no linear layer of this name is on the GPU throughout a step;",
        ),
        ({"activations": "chunk"}, "activations of 'layers.0.0' is 'chunk'; give keep, recompute or offload"),
    ],
)
def test_what_is_no_choice_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        hybrid(built(), **options)


def test_a_head_without_cross_entropy_is_refused() -> None:
    model = built()
    optimizer = hybrid(model, activations={"lm_head": "chunk"})
    model(batches(1)[0]).square().mean().backward()
    with pytest.raises(InputError, match="activations of 'lm_head' is 'chunk', but its result is read by square"):
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "GPT2", "Gemma2"])
def test_models_of_transformers_train_in_chunks(kind: str, chunks: list[int]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "use_cache": False,
    }  # fmt: skip
    if kind == "GPT2":
        sizes = {"vocab_size": 97, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "use_cache": False}
        sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    runs = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**sizes))
        model.train()
        optimizer = torch.optim.AdamW(model.parameters()) if is_plain else hybrid(model, head_chunks=4)
        losses = []
        for tokens in batches(2):
            loss = model(input_ids=tokens, labels=tokens.masked_fill(tokens % 5 == 0, -100)).loss
            loss.backward()
            losses.append(loss.item())
            optimizer.zero_grad()
        runs.append(losses)
    assert runs[1] == pytest.approx(runs[0], rel=1e-6)
    assert chunks == [4, 4]
