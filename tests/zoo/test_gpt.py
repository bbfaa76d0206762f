import pytest

pytest.importorskip("torch")

import resource

import torch

from pipedejavu.zoo import SHAPES, build


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "parameters", "tolerance"),
    [("gpt-1.3b", 1.3e9, 0.08), ("gpt-6.7b", 6.7e9, 0.05), ("gpt-175b", 175e9, 0.005)],
)
def test_parameters_are_what_the_name_says(name: str, parameters: float, tolerance: float) -> None:
    assert num_parameters(build(name, device="meta", data="random").model) == pytest.approx(parameters, rel=tolerance)


@pytest.mark.parametrize(("name", "parameters"), [("gpt-small", 124e6), ("gpt-medium", 355e6), ("gpt-large", 774e6)])
def test_with_their_vocabulary_sizes_are_those_of_gpt2(name: str, parameters: float) -> None:
    model = build(name, device="meta", data="random", vocabulary=50257, is_tied=True).model
    assert num_parameters(model) == pytest.approx(parameters, rel=0.005)


def test_units_are_named_as_in_the_profile_of_the_shape() -> None:
    model = build("gpt-tiny", device="meta").model
    blocks = [f"block{n}" for n in range(SHAPES["gpt-tiny"].layers)]
    assert [name for name, _ in model.units()] == ["embedding", *blocks, "head"]


def test_a_large_model_on_the_meta_device_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = build("gpt-1.3b", device=torch.device("meta"), data="random").model
    assert all(parameter.is_meta for parameter in model.parameters())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes, of 4.9 gigabytes


def test_a_free_size_is_built_and_runs() -> None:
    task = build("gpt-tiny", layers=10, width=32, context=1000, vocabulary=10000, heads=1, dropout=0.2)
    assert len(task.model.units()) == 12
    logits = task.model(torch.randint(10000, (1, 40)))
    assert logits.shape == (1, 40, 10000)


@pytest.mark.parametrize(
    ("width", "heads"), [(128, 2), (768, 12), (1280, 20), (2048, 16), (12288, 96), (10, 1), (96, 1)]
)
def test_heads_are_of_the_usual_size(width: int, heads: int) -> None:
    model = build("gpt-tiny", width=width, layers=1, device="meta").model
    assert dict(model.units())["block0"].attention.num_heads == heads


def test_no_token_sees_a_later_one() -> None:
    task = build("gpt-tiny", layers=2, width=32, context=12)
    tokens, _ = task.data.batch([5])
    changed = tokens.clone()
    changed[0, 8] += 1
    one, other = task.model(tokens), task.model(changed)
    assert torch.equal(one[:, :8], other[:, :8])
    assert not torch.allclose(one[:, 8:], other[:, 8:])


def test_attention_is_what_its_formula_says() -> None:
    attention = dict(build("gpt-tiny", layers=1, width=8, context=5, heads=2).model.units())["block0"].attention
    hidden = torch.randn(1, 5, 8)
    key, value = attention.key_value(hidden).chunk(2, dim=-1)
    query = attention.query(hidden)
    mixed = []
    for head in (slice(0, 4), slice(4, 8)):
        scores = query[0, :, head] @ key[0, :, head].T / 2
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
        mixed.append(scores.softmax(dim=-1) @ value[0, :, head])
    torch.testing.assert_close(attention(hidden)[0], attention.output(torch.cat(mixed, dim=-1)))


def test_dropout_depends_on_the_seed_that_is_set() -> None:
    task = build("gpt-tiny", layers=2, width=32, context=12, dropout=0.2)
    tokens, _ = task.data.batch([0])

    def run(seed: int) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return task.model(tokens)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    task.model.eval()
    assert torch.equal(run(1), run(2))


def test_a_sequence_that_is_too_long_is_refused() -> None:
    model = build("gpt-tiny", layers=1, width=8, context=5).model
    with pytest.raises(ValueError, match="a sequence has 6 tokens, but the model's context is 5; raise context"):
        model(torch.zeros(1, 6, dtype=torch.int64))


@pytest.mark.parametrize(("name", "dropout"), [("gpt-10-layers", 0.2), ("gpt-10-layers-no-dropout", 0.0)])
def test_ten_layers_have_one_head_and_a_long_context(name: str, dropout: float) -> None:
    task = build(name, device="meta")
    units = dict(task.model.units())
    assert len(units) == 12
    assert units["embedding"].position.weight.shape == (1000, 512)
    assert units["head"].logit.weight.shape == (10_000, 512)
    attention = units["block9"].attention
    assert (attention.num_heads, attention.dropout) == (1, dropout)
    (tokens, targets) = task.data.batch(range(2))
    assert tokens.shape == targets.shape == (2, 1000)
