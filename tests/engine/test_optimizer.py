"""The optimizers against torch's own, in float64 over many updates."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from pipedejavu.engine import AdamW, Sgd


def slows(update):
    return 1 / (1 + update) if update % 2 else 0.5


def spares(name):
    return name != "b"


@pytest.mark.parametrize("schedule", [None, slows])
@pytest.mark.parametrize("decays", [lambda _: True, spares])
@pytest.mark.parametrize(
    ("own", "theirs"),
    [
        (Sgd(lr=0.1), torch.optim.SGD),
        (Sgd(lr=0.1, weight_decay=0.2), torch.optim.SGD),
        (Sgd(lr=0.1, momentum=0.9), torch.optim.SGD),
        (Sgd(lr=0.1, momentum=0.9, weight_decay=0.2), torch.optim.SGD),
        (AdamW(lr=0.1), torch.optim.AdamW),
        (AdamW(lr=0.1, weight_decay=0.0), torch.optim.AdamW),
        (AdamW(lr=0.1, betas=(0.5, 0.7), eps=1e-3, weight_decay=0.3), torch.optim.AdamW),
    ],
)
def test_steps_are_those_of_torch(own, theirs, schedule, decays):
    own = type(own)(**{**vars(own), "schedule": schedule, "decays": decays})
    start = {"a": torch.randn(3, 2), "b": torch.randn(4)}
    others = ("schedule", "decays", "weight_decay", "is_decoupled", "moments")
    settings = {k: v for k, v in vars(own).items() if k not in others}
    parameters = {n: nn.Parameter(w.clone()) for n, w in start.items()}
    groups = [{"params": [p], "weight_decay": own.weight_decay * decays(n)} for n, p in parameters.items()]
    stepper = theirs(groups, **settings)
    scheduler = torch.optim.lr_scheduler.LambdaLR(stepper, schedule or (lambda _: 1.0))
    weights, state = {n: w.clone().requires_grad_() for n, w in start.items()}, {}
    for update in range(12):
        gradients = {n: torch.randn_like(w) for n, w in start.items()}
        kept = {n: g.clone() for n, g in gradients.items()}
        before = {n: w.detach().clone() for n, w in weights.items()}
        coefficient = 0.5 if update % 2 else 1.0  # exact
        scaled = {n: g.div_(coefficient) for n, g in gradients.items()}
        by_delta = deepcopy(state)
        deltas = dict(own.deltas(update, weights, {n: g.clone() for n, g in scaled.items()}, by_delta, coefficient))
        assert not any(delta.requires_grad for delta in deltas.values())
        own.step(update, weights, scaled, state, coefficient, out=gradients)
        assert all(torch.equal(weights[n], before[n]) for n in start), "weights are the caller's"
        assert all(gradients[n].equal(before[n] + deltas[n]) for n in start), "a step is its delta, bit for bit"
        assert all(state[n][slot].equal(by_delta[n][slot]) for n in state for slot in own.slots)
        weights = {n: w.requires_grad_() for n, w in gradients.items()}
        for n, p in parameters.items():
            p.grad = kept[n]
        stepper.step()
        scheduler.step()
        for n, p in parameters.items():
            assert torch.allclose(weights[n], p, rtol=0, atol=64 * torch.finfo(torch.float64).eps * (update + 1))
    assert float((weights["a"].detach() - start["a"]).abs().max()) > 1e-2


def test_the_state_carries_no_history():
    """Weights that autograd watches would otherwise be kept, version after version."""
    optimizer, state = Sgd(lr=0.1, momentum=0.9, weight_decay=0.1), {}
    weights = {"a": torch.ones(2, requires_grad=True)}
    for update in range(3):
        dict(optimizer.deltas(update, weights, {"a": torch.ones(2)}, state, 1.0))
    assert not any(t.requires_grad for tensors in state.values() for t in tensors.values())


def test_rates_follow_the_schedule():
    assert [Sgd(lr=2.0, schedule=slows).rate(n) for n in range(3)] == [1.0, 1.0, 1.0]
    assert [AdamW(lr=2.0, schedule=lambda n: n).rate(n) for n in range(3)] == [0.0, 2.0, 4.0]
    assert AdamW(lr=2.0).rate(7) == 2.0


@pytest.mark.parametrize("optimizer", [Sgd(lr=0.1), Sgd(lr=0.1, momentum=0.9, weight_decay=0.1), AdamW(lr=0.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_in_place_or_to_other_memory_leaves_the_gradients_and_gives_the_same_bits(optimizer, dtype):
    weights = {"a": torch.randn(5, 3, dtype=dtype), "b": torch.randn((), dtype=dtype)}
    gradients = {n: torch.randn_like(w) for n, w in weights.items()}
    kept = {n: g.clone() for n, g in gradients.items()}
    in_place, beside = ({n: w.clone() for n, w in weights.items()} for _ in range(2))
    optimizer.step(0, in_place, gradients, {}, 0.5, out=in_place)
    optimizer.step(0, weights, gradients, {}, 0.5, out=beside)
    assert all(gradients[n].equal(kept[n]) for n in kept)
    optimizer.step(0, weights, gradients, {}, 0.5, out=gradients)
    assert all(in_place[n].equal(gradients[n]) and beside[n].equal(gradients[n]) for n in kept)
    assert not any(weights[n].equal(gradients[n]) for n in kept)
