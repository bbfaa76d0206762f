"""Plans whose last unit runs its head in chunks train as a plain loop does, and their memory is forecast to be less."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pipedejavu import Trainer
from pipedejavu.facts import FaultsError, InputError
from pipedejavu.plan import Plan, preset
from pipedejavu.runtime import deferred_logits
from pipedejavu.zoo.gpt import Gpt
from pipedejavu.zoo.transformer import TransformerSize

WORDS, CHUNKS = 61, 5


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    taken: list[int] = []
    run = deferred_logits.chunked_cross_entropy

    def note(*args: Any, **kwargs: Any) -> Tensor:
        taken.append(kwargs["num_chunks"])
        return run(*args, **kwargs)

    monkeypatch.setattr(deferred_logits, "chunked_cross_entropy", note)
    return taken


def model(*, is_tied: bool) -> Gpt:
    return Gpt(TransformerSize(layers=2, width=16, context=8, vocabulary=WORDS, heads=2, is_tied=is_tied), seed=1)


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), targets.flatten())


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    made = [tuple(torch.randint(0, WORDS, (4, 8), generator=generator) for _ in range(2)) for _ in range(2)]
    for _, targets in made:
        targets[0, :5] = -100
    return made  # type: ignore[return-value]


def plan_of(name: str, workers: int, microbatches: int, recompute: float, num_chunks: int) -> Plan:
    plan = preset(name).at(workers=workers, microbatches=microbatches)
    return plan.replace(order=plan.order.replace(head_chunks=num_chunks, recompute=recompute))


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    ("name", "workers", "microbatches", "recompute"),
    [("1f1b", 1, 1, 0), ("1f1b", 2, 4, 0), ("1f1b", 2, 4, 1.0), ("gpipe", 1, 4, 0.5), ("zb-h1", 2, 4, 0)],
)
def test_training_equals_a_plain_loop(
    name: str, workers: int, microbatches: int, recompute: float, is_tied: bool, chunks: list[int]
) -> None:
    plain, divided = model(is_tied=is_tied), model(is_tied=is_tied)
    optimizer, losses = torch.optim.AdamW(plain.parameters(), lr=0.01), []
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss = loss_of(plain(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    plan = plan_of(name, workers, microbatches, recompute, CHUNKS)
    trainer = Trainer(divided, torch.optim.AdamW(divided.parameters(), lr=0.01), loss_of, plan=plan)
    assert [trainer.step(batch) for batch in batches()] == pytest.approx(losses, rel=1e-12)
    trainer.save_to_model()
    for one, other in zip(divided.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    assert chunks.count(CHUNKS) == 2 * microbatches * (2 if recompute == 1 else 1)
    assert f"head({CHUNKS} chunks)" in str(trainer.program.plan.order)


def test_the_forecast_counts_the_memory_that_chunks_save() -> None:
    peaks = {}
    for num_chunks in (1, 4, 16):
        divided = model(is_tied=False)
        trainer = Trainer(divided, None, loss_of, plan=preset("1f1b").at(workers=2, microbatches=4),
                          head_chunks=num_chunks, sample=batches()[0])  # fmt: skip
        assert trainer.program.plan.order.head_chunks == num_chunks
        last = trainer.program.profile.units[-1]
        peaks[num_chunks] = last.activation_bytes + max(last.forward_work_bytes, last.backward_work_bytes)
    # Of 8 tokens per sample, at least the log-probabilities and a gradient of them no longer exist together.
    assert peaks[1] - peaks[16] >= 2 * 8 * 8 * WORDS
    assert peaks[1] > peaks[4] >= peaks[16]


def test_a_model_without_such_a_head_is_refused() -> None:
    divided = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    sample = torch.randn(8, 4), torch.randn(8, 2)
    text = (
        "the plan runs the model's head in 4 chunks, and the profile knows none: the last unit ends in no linear layer"
    )
    with pytest.raises(FaultsError, match=text):
        Trainer(divided, None, torch.nn.functional.mse_loss, plan="1f1b", head_chunks=4, sample=sample)
    with pytest.raises(InputError, match="head_chunks is 0; give 1 or more chunks of tokens, or None"):
        Trainer(divided, None, torch.nn.functional.mse_loss, head_chunks=0)


def test_a_model_of_transformers_that_computes_its_own_loss_trains_in_chunks(chunks: list[int]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    tokens = torch.randint(3, 97, (4, 9))
    batch = {"input_ids": tokens, "labels": tokens.masked_fill(tokens % 5 == 0, -100)}
    runs = []
    for microbatches in (0, 4):
        torch.manual_seed(0)
        divided = transformers.AutoModelForCausalLM.from_config(config).double().train()
        optimizer = torch.optim.AdamW(divided.parameters(), lr=0.01)
        if microbatches == 0:
            losses = []
            for _ in range(2):
                optimizer.zero_grad()
                loss = divided(**batch).loss
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        else:
            trainer = Trainer(divided, optimizer, None, plan=plan_of("1f1b", 2, microbatches, 0, CHUNKS))
            losses = [trainer.step(batch) for _ in range(2)]
        runs.append(losses)
    # transformers computes the loss in float32.
    assert runs[1] == pytest.approx(runs[0], rel=1e-6)
    assert chunks.count(CHUNKS) == 2 * 4
