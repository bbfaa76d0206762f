"""AdamW of float32 weights on the host: the bits of the shared arithmetic on every path, torch's within rounding."""

import math

import pytest
import torch
from torch import nn

from pipedejavu.engine import AdamW
from pipedejavu.optim import native
from pipedejavu.optim.arithmetic import AdamState, scalars_of, update_

SHAPES = {"matrix": (70, 1000), "bias": (33,), "scale": (), "none": (0, 4)}
"""The first has more elements than a chunk of the native pass."""


def spares(name):
    return name != "bias"


def slows(update):
    return 1 / (1 + update)


OPTIMIZER = AdamW(lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2, schedule=slows, decays=spares)


@pytest.fixture(params=["native", "torch"])
def library(request, monkeypatch):
    """Runs a test with the native library, and without it."""
    monkeypatch.setattr(native, "_shared_updates", {})
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("_native.so was not built: no C compiler at install")


def tensors(seed):
    source = torch.Generator().manual_seed(seed)
    return {n: torch.randn(shape, generator=source, dtype=torch.float32) for n, shape in SHAPES.items()}


def by_reference(weights, updates, coefficient):
    """Returns weights, m and v after some updates by the arithmetic alone."""
    weights = {n: w.clone() for n, w in weights.items()}
    moments = {n: (torch.zeros_like(w), torch.zeros_like(w)) for n, w in weights.items()}
    for update in range(updates):
        for n, gradient in tensors(10 + update).items():
            decay = 0.2 if n != "bias" else 0.0
            s = scalars_of(update + 1, 0.1 / (1 + update), (0.8, 0.9), 1e-6, decay, coefficient)
            state = AdamState(weights[n].view(-1), None, *(moment.view(-1) for moment in moments[n]))
            update_(s, gradient.view(-1), state, state)
    return weights, moments


def assert_equal(weights, state, reference):
    expected, moments = reference
    for n, weight in weights.items():
        assert weight.equal(expected[n])
        assert state[n]["m"].equal(moments[n][0])
        assert state[n]["v"].equal(moments[n][1])


@pytest.mark.parametrize("is_in_place", [True, False])
def test_updates_are_those_of_the_arithmetic_bit_for_bit(library, is_in_place):
    start = tensors(1)
    weights, state = {n: w.clone() for n, w in start.items()}, {}
    for update in range(4):
        gradients = tensors(10 + update)
        leaves = {n: w.requires_grad_() for n, w in weights.items()}
        out = leaves if is_in_place else gradients
        OPTIMIZER.step(update, leaves, gradients, state, 0.3, out=out)
        weights = {n: w.detach() for n, w in out.items()}
    assert_equal(weights, state, by_reference(start, 4, 0.3))
    assert all(slots["step"].item() == 4 for slots in state.values())
    assert all(slots.keys() == OPTIMIZER.slots for slots in state.values())


def test_deltas_lead_to_the_same_state_and_to_the_weights_within_a_rounding(library):
    start = tensors(1)
    weights, state = {n: w.clone() for n, w in start.items()}, {}
    gradients = tensors(10)
    for n, delta in OPTIMIZER.deltas(0, weights, gradients, state, 0.3):
        assert delta.data_ptr() == gradients[n].data_ptr(), "no memory but the gradients' own"
        assert weights[n].equal(start[n]), "weights are the caller's"
        weights[n] = start[n] + delta
    expected, moments = by_reference(start, 1, 0.3)
    for n, weight in weights.items():
        # The difference and the sum round once each, by at most half a unit in the last place of the larger weight.
        largest = torch.maximum(start[n].abs(), expected[n].abs())
        assert ((weight - expected[n]).abs() <= 1.5 * torch.finfo(torch.float32).eps * largest).all()
        assert state[n]["m"].equal(moments[n][0])
        assert state[n]["v"].equal(moments[n][1])


@pytest.mark.parametrize("strided", ["weight", "gradient", "all", "slice"])
def test_tensors_of_any_strides_give_the_same_bits(library, strided):
    start, gradient = tensors(1)["matrix"], tensors(10)["matrix"]
    weight = {
        "weight": start.t().contiguous().t(), "all": start.t().contiguous().t(), "gradient": start.clone(),
        "slice": torch.zeros(70, 2000, dtype=torch.float32)[:, ::2].copy_(start),
    }[strided]  # fmt: skip
    if strided in ("gradient", "all"):
        gradient = gradient.t().contiguous().t()
    weights, state = {"matrix": weight}, {}
    OPTIMIZER.step(0, weights, {"matrix": gradient}, state, 0.3, out=weights)
    expected, moments = by_reference(tensors(1), 1, 0.3)
    assert weight.equal(expected["matrix"])
    assert state["matrix"]["v"].equal(moments["matrix"][1])


def test_torch_agrees_within_rounding(library):
    """Both take the same real function of the same gradients; the bound adds up what each rounds.

    m and v are sums of terms of one sign or of bounded size: each update rounds them about 4 times, relative to the
    largest gradient so far. m / root(v) is at most root(steps) in size, so an update's step is at most lr times that,
    with a relative error of 16 roundings per update so far; the weight rounds twice more.
    """
    start, state, steps, lr = tensors(1), {}, 8, 0.01
    own = AdamW(lr=lr, weight_decay=0.1)
    parameters = {n: nn.Parameter(w.clone()) for n, w in start.items()}
    theirs = torch.optim.AdamW(parameters.values(), lr=lr, weight_decay=0.1)
    weights = {n: w.clone() for n, w in start.items()}
    for update in range(steps):
        gradients = tensors(10 + update)
        for n, p in parameters.items():
            p.grad = gradients[n].clone()
        theirs.step()
        own.step(update, weights, {n: 2 * g for n, g in gradients.items()}, state, 0.5, out=weights)
    unit = torch.finfo(torch.float32).eps / 2
    for n, p in parameters.items():
        largest = max([float(w.abs().max()) for w in (start[n], weights[n]) if w.numel()], default=0.0)
        bound = steps * unit * (4 * largest + 16 * steps * lr * math.sqrt(steps) * 2)
        assert ((weights[n] - p).abs() <= bound).all(), n
    assert float((weights["matrix"] - start["matrix"]).abs().max()) > 1e-2


def test_a_state_that_torch_began_continues(library):
    """A checkpoint of an earlier version has the same slots, with the step as a float."""
    weights = tensors(1)
    state = {
        n: {"step": torch.tensor(3.0), "m": torch.full_like(w, 0.1), "v": torch.full_like(w, 0.2)}
        for n, w in weights.items()
    }
    old = AdamState(weights["matrix"].clone(), None, *(state["matrix"][slot].clone() for slot in "mv"))
    gradients = tensors(10)
    update_(scalars_of(4, 0.025, (0.8, 0.9), 1e-6, 0.2, 1.0), gradients["matrix"], old, old)
    OPTIMIZER.step(3, weights, gradients, state, 1.0, out=weights)
    assert weights["matrix"].equal(old.weight)
    assert state["matrix"]["step"].item() == 4


def test_float64_beside_float32_stays_in_torch(library):
    weights = {"a": torch.ones(3, dtype=torch.float32), "b": torch.ones(3, dtype=torch.float64)}
    gradients = {n: torch.full_like(w, 0.5) for n, w in weights.items()}
    AdamW(lr=0.1).step(0, weights, gradients, {}, 1.0, out=weights)
    expected = 1 - 0.1 * 0.01 - 0.1 * 0.5 / (0.5 + 1e-8)
    assert (weights["b"] - expected).abs().max() < 1e-15
    assert (weights["a"] - expected).abs().max() < 1e-6
