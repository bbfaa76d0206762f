"""The Trainer divides the experts of unchanged models, against a plain loop with all experts in one process."""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn

from pipedejavu.engine import Sgd
from pipedejavu.facts import InputError
from pipedejavu.session import Trainer

SIZES = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 16,
}


def moe_model(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "mixtral":
        config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    else:
        config = transformers.Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=8, head_dim=4)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def batch(samples: int, seed: int) -> dict[str, Tensor]:
    """Sequences with labels, some of which do not count."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 32, (samples, 8), generator=generator)
    labels = tokens.clone()
    labels[0, : seed % 5 + 1] = -100
    return {"input_ids": tokens, "labels": labels}


def in_loops(model: nn.Module) -> nn.Module:
    """Returns a copy that runs expert after expert: torch has grouped products for few bits only."""
    plain = copy.deepcopy(model)
    plain.set_experts_implementation("eager")
    return plain


def trained_plainly(model: nn.Module, batches: list[dict[str, Tensor]]) -> tuple[nn.Module, list[float]]:
    """Returns the model after a step with each whole batch, and the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for each in batches:
        optimizer.zero_grad()
        loss = model(**each).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def furthest(model: nn.Module, exact: nn.Module) -> float:
    return max(
        float((weight.detach().double() - other.detach()).abs().max())
        for weight, other in zip(model.parameters(), exact.parameters(), strict=True)
    )


@pytest.mark.parametrize(("name", "workers"), [("mixtral", 2), ("qwen3", 4)])
def test_divided_experts_of_transformers_train_as_in_a_plain_loop(name: str, workers: int) -> None:
    """The difference to float64 is that of a plain loop in float32: less than eight times as much."""
    model, batches = moe_model(name), [batch(size, size) for size in (8, 7, 5)]
    begun = copy.deepcopy(model)
    exact, losses = trained_plainly(in_loops(model).double(), batches)
    rounded, _ = trained_plainly(in_loops(model), batches)
    settings = Sgd(lr=0.3, momentum=0.9)
    trainer = Trainer(model, sample=batches[0], plan="moe", workers=workers, optimizer=settings, clip_norm=0.5)
    result = [float(trainer.step(each)) for each in batches]
    trainer.save_to_model()
    assert result == pytest.approx(losses, rel=1e-5)
    assert furthest(model, exact) <= 8 * furthest(rounded, exact)
    assert furthest(begun, exact) > 1e3 * furthest(rounded, exact)


def test_a_model_without_experts_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    sample = torch.randn(4, 4).double(), torch.tensor([0, 1, 0, 1])
    with pytest.raises(InputError, match="layout 'expert' divides experts, and no unit of this model has any"):
        Trainer(model, nn.CrossEntropyLoss(), sample=sample, plan="moe", workers=2)
