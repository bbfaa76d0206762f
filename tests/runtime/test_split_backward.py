"""Both halves of a backward give the bits of a whole one, run no product twice, and keep only what the second needs."""

import copy
import gc
import weakref
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pipedejavu.runtime.saved_storage import SavedTensorOffload
from pipedejavu.runtime.split_backward import backward_inputs
from pipedejavu.zoo.gpt import Gpt
from pipedejavu.zoo.transformer import TransformerSize


class Tied(nn.Module):
    """Embeds the tokens nearest to its input and scores with the same table."""

    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(9, 6), nn.Linear(6, 6)

    def forward(self, x):
        tokens = (x.detach() * 4).long().abs().sum(-1) % 9
        return torch.tanh(self.linear(x) + self.table(tokens)) @ self.table.weight.T


class Square(torch.autograd.Function):
    """A product with both gradients in one Python function, which cannot be divided."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.weight, self.after = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 6)

    def forward(self, x):
        return self.after(Square.apply(self.before(x), self.weight))


class Operands(nn.Module):
    """Weights as either operand of each kind of product, with factors, broadcast summands and a column-major layout."""

    def __init__(self):
        super().__init__()
        self.left, self.batch = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(2, 6, 6))
        self.flipped = nn.Parameter(torch.randn(6, 6).T)
        self.row, self.single = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(1, 6))

    def forward(self, x):
        y = torch.addmm(self.row, x, self.flipped, beta=0.5, alpha=3)
        y = torch.tanh(torch.addmm(self.single, self.left, y))
        y = torch.bmm(torch.stack((y, y.sin())), self.batch)
        return torch.baddbmm(self.single, y, self.batch, beta=2, alpha=0.5).sum(0)


class Hooked(nn.Module):
    """Doubles the gradient of a value between its layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        y = self.first(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: 2 * gradient)
        return self.second(torch.tanh(y))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 6)

    def forward(self, x):
        return self.outer(checkpoint(self.inner, x, use_reentrant=False))


class Cast(nn.Module):
    """Uses a weight twice under autocast, which casts it once."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(torch.tanh(self.linear(x))).float()


def gpt():
    return Gpt(TransformerSize(layers=2, width=6, context=5, vocabulary=9, heads=2))


def used_thrice(layer):
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer)


def mlp():
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(inplace=True), nn.LayerNorm(12), nn.Linear(12, 6, bias=False))


def convnet():
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(8, 3, 3, stride=2, output_padding=1))


def frozen():
    model = mlp()
    model[0].weight.requires_grad_(False)
    model[3].weight.requires_grad_(False)
    return nn.Sequential(model, nn.Linear(6, 6))


VECTORS, PICTURES, TOKENS = (4, 6), (2, 3, 8, 8), (2, 5, 6)
CASES = {
    "mlp": (mlp, VECTORS, 2, 2),
    "mlp of sequences": (mlp, TOKENS, 2, 2),
    "convnet": (convnet, PICTURES, 3, 2),
    "encoder": (lambda: nn.TransformerEncoderLayer(6, 2, 24, dropout=0.0, batch_first=True), TOKENS, 4, 5),
    "gpt block": (lambda: next(unit for name, unit in gpt().named_modules() if name.endswith("block0")), TOKENS, 5, 4),
    "linear used thrice": (lambda: used_thrice(nn.Linear(6, 6)), VECTORS, 3, 0),
    "convolution used thrice": (lambda: used_thrice(nn.Conv2d(3, 3, 3, padding=1)), PICTURES, 3, 0),
    "tied": (Tied, VECTORS, 1, 1),
    "custom function": (Custom, VECTORS, 2, 1),
    "operands": (Operands, VECTORS, 4, 0),
    "hooked": (Hooked, VECTORS, 2, 0),
    "checkpointed": (Checkpointed, VECTORS, 1, 2),
    "cast": (Cast, VECTORS, 2, 0),
    "frozen": (frozen, VECTORS, 1, 3),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), VECTORS, 1, 0),
    "recurrent": (lambda: nn.RNNCell(6, 6), VECTORS, 1, 2),
}
"""By name: the model, the shape of its input, how many products wait, and how many weights do not."""


def weights_of(model):
    return [w for w in model.parameters() if w.requires_grad]


def halves(model, x, head):
    """Returns the gradient of a leaf, and the second half."""
    leaf = x.clone().requires_grad_()
    (passed,), pending = backward_inputs([model(leaf.clone())], [head], [leaf], weights_of(model))
    return passed, pending


def whole(model, x, head):
    leaf = x.clone().requires_grad_()
    model(leaf.clone()).backward(head)
    return leaf.grad


@pytest.mark.parametrize("name", CASES)
def test_both_halves_give_the_bits_of_a_whole_backward(name):
    make, shape, waiting, ready = CASES[name]
    torch.manual_seed(0)
    model, inputs = make(), [torch.randn(shape) for _ in range(2)]
    with torch.no_grad():
        heads = [torch.randn_like(model(x)) for x in inputs]
    twin = copy.deepcopy(model)
    for x, head in zip(inputs, heads, strict=True):  # the second adds to the first
        expected = whole(twin, x, head)
        passed, pending = halves(model, x, head)
        assert (len(pending._kept), len(pending._ready)) == (waiting, ready)
        pending.accumulate()
        assert torch.equal(passed, expected)
        for weight, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert (weight.grad is None) == (other.grad is None)
            if weight.grad is not None:
                assert torch.equal(weight.grad, other.grad)
                assert weight.grad.stride() == other.grad.stride()


class Operations(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._overloadpacket.__name__
        if name == "convolution_backward":
            self.counts.update({name: sum(args[-1][:2])})  # gradients of the input and of the weight
        elif name in ("mm", "bmm", "addmm", "baddbmm"):
            self.counts["product"] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["mlp", "convnet", "encoder", "gpt block", "linear used thrice", "custom function"])
def test_no_product_runs_twice(name):
    make, shape, *_ = CASES[name]
    model, x = make(), torch.randn(shape)
    output = model(x.requires_grad_())
    with Operations() as expected:
        output.backward(torch.ones_like(output))
    output = model(x)
    with Operations() as first:
        _, pending = backward_inputs([output], [torch.ones_like(output)], [x], weights_of(model))
    with Operations() as second:
        pending.accumulate()
    assert first.counts + second.counts == expected.counts
    assert all(0 < second.counts[kind] < count for kind, count in expected.counts.items())


def test_a_whole_gpt_whose_embedding_and_head_are_tied():
    model, tokens = gpt(), torch.randint(0, 9, (3, 5))
    twin = copy.deepcopy(model)
    output = twin(tokens)
    head = torch.randn_like(output)
    output.backward(head)
    _, pending = backward_inputs([model(tokens)], [head], [], weights_of(model))
    pending.accumulate()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_only_operands_and_output_gradients_stay():
    """Of a saved value that no product reads, nothing is left after the first half."""
    model = nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Softplus(), nn.Linear(50, 6))
    x = torch.randn(7, 6, requires_grad=True)
    hidden = model[0](x)
    middle = torch.tanh(hidden)
    gone, stays = weakref.ref(middle.untyped_storage()), model[2](middle)
    output = model[3](stays)
    head = torch.randn(7, 6)
    _, pending = backward_inputs([output], [head], [x], weights_of(model))
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in pending.tensors}
    assert sum(held.values()) == 4 * 7 * (6 + 50 + 50 + 6)
    assert {t.data_ptr() for t in (x, stays, head)} <= held.keys()
    gc.disable()
    try:
        del hidden, middle, output
        assert gone() is None
    finally:
        gc.enable()
    pending.accumulate()
    assert pending.tensors == ()


def test_what_an_offload_brings_back_can_wait():
    model, x, head = mlp(), torch.randn(4, 6), torch.randn(4, 6)
    twin = copy.deepcopy(model)
    expected = whole(twin, x, head)
    leaf = x.clone().requires_grad_()
    with SavedTensorOffload(model.parameters()):
        output = model(leaf)
    (passed,), pending = backward_inputs([output], [head], [leaf], weights_of(model))
    assert len(pending._kept) == 2
    pending.accumulate()
    assert torch.equal(passed, expected)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_outputs_without_a_way_to_an_input_or_to_any_weight():
    weight, x = torch.randn(3, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    lonely = torch.randn(2, 3, requires_grad=True)
    outputs: list[Tensor] = [x @ weight, weight.sin(), x * 1, weight]
    heads = [torch.randn_like(t) for t in outputs]
    expected = torch.autograd.grad(outputs, (x, weight), heads, retain_graph=True)
    (passed, none), pending = backward_inputs(outputs, heads, [x, lonely], [weight])
    pending.accumulate()
    assert none is None
    assert torch.equal(passed, expected[0])
    assert torch.equal(weight.grad, expected[1])
    assert backward_inputs([], [], [x], [weight])[0] == (None,)
