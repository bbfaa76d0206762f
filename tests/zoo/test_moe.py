import math

import pytest

pytest.importorskip("torch")

import torch

from pipedejavu.zoo import build
from pipedejavu.zoo.moe import Mixture, MoeSize, Router


def materialised(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    draw = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=draw)
    return module


def size_of(**options: float) -> MoeSize:
    return MoeSize.model_validate({"layers": 1, "width": 8, **options})


def hidden_of(samples: int, tokens: int) -> torch.Tensor:
    return torch.randn(samples, tokens, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("top", [1, 2, 3])
@pytest.mark.parametrize("factor", [0.3, 1.0, 4.0])
def test_tokens_are_conserved_and_capacity_is_kept(top: int, factor: float) -> None:
    router = materialised(Router(size_of(experts=4, top=top, capacity_factor=factor)))
    route = router(hidden_of(3, 10))
    capacity = math.ceil(top * 10 / 4 * factor)
    assert router.capacity(10) == min(10, capacity)
    assert route.expert.shape == (3, 10, top)
    for sample in range(3):
        for expert in range(4):
            visits = route.expert[sample] == expert
            kept = visits & route.is_kept[sample]
            assert int(kept.sum()) == min(int(visits.sum()), capacity)
            assert sorted(route.slot[sample][visits].tolist()) == list(range(int(visits.sum())))
        assert all(len(set(token)) == top for token in route.expert[sample].tolist())
    if factor == 4.0:
        assert route.is_kept.all()


def test_places_are_given_out_in_the_order_of_tokens() -> None:
    router = Router(size_of(width=2, experts=2, top=1, capacity_factor=1.0))
    torch.nn.init.eye_(router.gate.weight)
    one, two = [5.0, 0.0], [0.0, 5.0]
    route = router(torch.tensor([[one, one, two, one]]))
    assert route.expert[0, :, 0].tolist() == [0, 0, 1, 0]
    assert route.slot[0, :, 0].tolist() == [0, 1, 0, 2]
    assert route.is_kept[0, :, 0].tolist() == [True, True, True, False]


def test_the_balance_by_hand() -> None:
    router = Router(size_of(width=2, experts=2, top=1))
    torch.nn.init.eye_(router.gate.weight)
    logit = math.log(3)  # gates of 3/4 and 1/4
    hidden = torch.tensor([[[logit, 0.0], [logit, 0.0], [0.0, logit], [logit, 0.0]]])
    route = router(hidden)
    # Mean gates: (3·3/4 + 1/4) / 4 = 5/8 and 3/8; fractions: 3/4 and 1/4.
    assert float(route.balance.detach()) == pytest.approx(2 * (5 / 8 * 3 / 4 + 3 / 8 * 1 / 4))
    assert route.weight[0, :, 0].tolist() == pytest.approx([0.75] * 4)


def test_an_even_spread_has_the_balance_one() -> None:
    for top in (1, 2, 4):
        router = Router(size_of(experts=4, top=top))
        torch.nn.init.zeros_(router.gate.weight)
        assert router(hidden_of(2, 6)).balance.tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("top", [1, 2, 4])
def test_without_drops_the_mixture_is_the_dense_sum(top: int) -> None:
    mixture = materialised(Mixture(size_of(experts=4, top=top, capacity_factor=4.0))).double()
    hidden = hidden_of(3, 5).double()
    gates = (hidden @ mixture.router.gate.weight.T).softmax(dim=-1)
    everywhere = mixture.experts(hidden.flatten(0, 1).expand(4, -1, -1)).view(4, 3, 5, 8)
    best = gates.topk(top, dim=-1).indices
    expected = torch.zeros_like(hidden)
    for sample in range(3):
        for token in range(5):
            for expert in best[sample, token].tolist():
                expected[sample, token] += gates[sample, token, expert] * everywhere[expert, sample, token]
    mixed, _ = mixture(hidden)
    torch.testing.assert_close(mixed, expected, rtol=1e-10, atol=1e-12)


def test_a_dropped_token_passes_through_the_residual_alone() -> None:
    mixture = materialised(Mixture(size_of(experts=4, top=1, capacity_factor=0.3)))
    hidden = hidden_of(2, 10)
    route = mixture.router(hidden)
    mixed, _ = mixture(hidden)
    is_dropped = ~route.is_kept[..., 0]
    assert is_dropped.any()
    assert not mixed[is_dropped].any()
    assert mixed[~is_dropped].any(dim=-1).all()


def test_a_sample_is_the_same_whatever_shares_its_microbatch() -> None:
    mixture = materialised(Mixture(size_of(experts=4, top=2, capacity_factor=0.5))).double()
    hidden = hidden_of(5, 7).double()
    mixed, balance = mixture(hidden)
    for n in range(5):
        alone, own = mixture(hidden[n : n + 1])
        torch.testing.assert_close(alone[0], mixed[n], rtol=1e-12, atol=1e-12)
        assert torch.allclose(own, balance[n], rtol=1e-12)


def test_no_token_sees_a_later_one_even_by_being_dropped() -> None:
    task = build("moe-tiny", layers=2, width=32, context=12, capacity_factor=0.5)
    tokens, _ = task.data.batch([5])
    for place in (3, 8, 11):
        changed = tokens.clone()
        changed[0, place] = (changed[0, place] + 31) % 256
        one, other = task.model(tokens)[0], task.model(changed)[0]
        torch.testing.assert_close(one[:, :place], other[:, :place], rtol=1e-5, atol=1e-6)


def test_gates_are_computed_in_fp32_under_lower_precision() -> None:
    mixture = materialised(Mixture(size_of(experts=4, top=2)))
    assert mixture.to(torch.bfloat16)(hidden_of(1, 6).bfloat16())[1].dtype == torch.float32
    mixture.float()
    with torch.autocast("cpu", torch.bfloat16):
        route = mixture.router(hidden_of(1, 6))
    assert route.weight.dtype == torch.float32
    assert torch.equal(route.weight, mixture.router(hidden_of(1, 6)).weight)
    assert mixture.double()(hidden_of(1, 6).double())[1].dtype == torch.float64


def test_the_balance_of_all_blocks_enters_the_loss() -> None:
    task = build("moe-tiny", layers=3, width=16, context=6, balance=0.5)
    plain = build("moe-tiny", layers=3, width=16, context=6, balance=0.0)
    inputs, target = task.data.batch([0, 1])
    output = task.model(inputs)
    mean = float((task.loss(output, target) - plain.loss(output, target)).detach()) / task.count(target)
    assert mean == pytest.approx(0.5 * float(output[1].detach().mean()), rel=1e-4)
    assert 3 * 0.9 < float(output[1].detach().mean()) < 3 * 2


def test_the_gate_learns_from_loss_and_balance() -> None:
    for options in ({"balance": 0.0}, {"balance": 1.0}):
        task = build("moe-tiny", layers=1, width=16, context=6, **options)
        inputs, target = task.data.batch([0])
        task.loss(task.model(inputs), target).backward()
        assert dict(task.model.units())["block0"].mixture.router.gate.weight.grad.any()
