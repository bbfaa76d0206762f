"""A piece at work: gradients like autograd's of the whole, randomness by number alone, buffers and ties."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout

from pipedejavu.engine import Sgd
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.recompute_span import backward, backward_input, backward_weights
from pipedejavu.engine.unit_random import mixed


def runner_of(*modules, seed=3):
    return PieceRunner([(n, f"u{n}", module) for n, module in enumerate(modules)], seed)


def leaves(runner):
    return {n: w.clone().requires_grad_() for n, w in runner.initial.items()}


def two_layers():
    return [nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Linear(5, 2)]


def test_gradients_are_those_of_autograd():
    modules, x = two_layers(), torch.randn(3, 4)
    runner = runner_of(*modules)
    output, saved = runner.forward(leaves(runner), x, 0)
    head = torch.randn(3, 2)
    (passed,), own = backward(saved, (head,))
    x.requires_grad_()
    expected = modules[1](modules[0](x))
    expected.backward(head)
    assert torch.equal(output, expected)
    assert torch.equal(passed, x.grad)
    named = {f"u{k}.{n}": p for k, module in enumerate(modules) for n, p in module.named_parameters()}
    assert own.keys() == named.keys()
    assert all(torch.equal(gradient, named[n].grad) for n, gradient in own.items())


def test_the_halves_of_a_backward_are_the_whole():
    runner, x, head = runner_of(*two_layers()), torch.randn(3, 4), torch.randn(3, 2)
    whole = backward(runner.forward(leaves(runner), x, 0)[1], (head,))
    _, saved = runner.forward(leaves(runner), x, 0)
    passed, half = backward_input(saved, (head,))
    assert torch.equal(passed[0], whole[0][0])
    own = backward_weights(half)
    assert all(torch.equal(gradient, whole[1][n]) for n, gradient in own.items())


def test_the_weights_are_those_that_are_handed_in():
    runner, x = runner_of(nn.Linear(2, 2, bias=False)), torch.randn(3, 2)
    own = {"u0.weight": 2 * torch.eye(2)}
    assert torch.equal(runner.forward(own, x, 0)[0], 2 * x)
    assert not torch.equal(runner.units[0][2].weight, own["u0.weight"])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(3, 4, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0]


def test_recurrent_modules_use_the_weights_that_are_handed_in():
    module, other, x = Recurrent(), Recurrent(), torch.randn(2, 5, 3)
    runner, head = runner_of(module), torch.randn(2, 5, 4)
    weights = {f"u0.{n}": p.detach().clone().requires_grad_() for n, p in other.named_parameters()}
    output, saved = runner.forward(weights, x, 0)
    _, own = backward(saved, (head,))
    expected = other(x)
    expected.backward(head)
    assert torch.equal(output, expected)
    assert all(torch.equal(own[f"u0.{n}"], p.grad) for n, p in other.named_parameters())
    assert not torch.equal(module(x), expected)


def test_several_values_pass_and_integers_have_no_gradient():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, pair):
            x, index = pair
            return x * self.scale, x[index]

    runner = runner_of(Pair())
    x, index = torch.randn(3), torch.tensor([2, 0])
    output, saved = runner.forward(leaves(runner), (x, index), 0)
    assert isinstance(output, tuple)
    passed, own = backward(saved, (torch.ones(3), torch.ones(2)))
    assert torch.equal(passed[0], torch.tensor([3.0, 2.0, 3.0]))
    assert torch.equal(passed[1], torch.zeros(2, dtype=torch.int64))
    assert torch.allclose(own["u0.scale"], x.sum())


def test_a_parameter_without_a_part_in_the_output_has_a_gradient_of_zeros():
    class Unused(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.other = nn.Parameter(torch.randn(3))

    runner = runner_of(Unused())
    _, saved = runner.forward(leaves(runner), torch.randn(1, 2), 0)
    assert torch.equal(backward(saved, (torch.ones(1, 2),))[1]["u0.other"], torch.zeros(3))


def test_a_piece_without_parameters_passes_gradients_on():
    runner = runner_of(nn.Tanh(), nn.Flatten())
    assert runner.initial == {}
    _, saved = runner.forward({}, torch.zeros(2, 3, 1), 0)
    (passed,), own = backward(saved, (torch.ones(2, 3),))
    assert torch.equal(passed, torch.ones(2, 3, 1))
    assert own == {}


def test_a_weight_that_two_units_of_a_piece_share_is_one():
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    runner = runner_of(first, second)
    assert [*runner.initial] == ["u0.weight"]
    x = torch.randn(2, 3)
    _, saved = runner.forward(leaves(runner), x, 0)
    _, own = backward(saved, (torch.ones(2, 3),))
    second(first(x)).sum().backward()
    assert torch.allclose(own["u0.weight"], first.weight.grad, rtol=0, atol=1e-15)


class Functional(nn.Module):
    """Draws its own mask; nothing in its modules says so."""

    def forward(self, x):
        return dropout(x, 0.5, self.training)


RANDOM = {
    "dropout": lambda: nn.Dropout(0.5),
    "of channels": lambda: nn.Dropout1d(0.5),
    "alpha": lambda: nn.AlphaDropout(0.5),
    "rrelu": nn.RReLU,
    "functional": Functional,
}


@pytest.mark.parametrize("kind", RANDOM)
def test_randomness_depends_on_seed_microbatch_and_unit_alone(kind):
    x = -torch.ones(8, 16)

    def masks(microbatch, seed=3, number=0):
        runner = PieceRunner([(number, "u", RANDOM[kind]())], seed)
        outputs = [runner.forward({}, x, microbatch)[0]]
        torch.rand(5)  # somebody else draws
        runner.forward({}, x, microbatch + 7)
        outputs.append(runner.forward({}, x, microbatch)[0])
        assert torch.equal(*outputs)
        return outputs[0]

    first = masks(0)
    assert torch.equal(first, masks(0))
    assert not torch.equal(first, masks(1))
    assert not torch.equal(first, masks(0, seed=4))
    assert not torch.equal(first, masks(0, number=1))


def test_seeding_a_unit_changes_no_generator_of_other_devices():
    queued = torch.cuda._lazy_seed_tracker.get_calls
    before, runner, x = queued(), runner_of(nn.Dropout(0.5)), torch.ones(8, 16)
    found, _ = runner.forward({}, x, 2)
    assert queued() == before
    torch.manual_seed(mixed(3, 2, 0))
    assert torch.equal(found, dropout(x, 0.5))


def test_randomness_is_the_same_however_units_are_cut():
    modules, x = [nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5)], torch.randn(4, 6)
    whole = runner_of(*modules)
    expected, _ = whole.forward(leaves(whole), x, 2)
    value = x
    for units in ([0], [1, 2]):
        part = PieceRunner([(n, f"u{n}", modules[n]) for n in units], 3)
        value, _ = part.forward(leaves(part), value, 2)
    assert torch.equal(value, expected)


def test_running_statistics_stay_where_they_are_told_to():
    module = nn.BatchNorm1d(3)
    runner, x = runner_of(module), torch.randn(5, 3)
    expected = copy.deepcopy(module)
    expected(x)
    first, _ = runner.forward(leaves(runner), x, 0)
    assert torch.equal(module.running_mean, expected.running_mean)
    again, _ = runner.forward(leaves(runner), x, 0, keeps_buffers=True)
    assert torch.equal(first, again)
    assert torch.equal(module.running_mean, expected.running_mean)
    assert int(module.num_batches_tracked) == 1


class Shift(nn.Module):
    """y = x + a + b: autograd hands one and the same tensor out as three gradients."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(2, 5)), nn.Parameter(torch.zeros(2, 5))

    def forward(self, x):
        return x + self.a + self.b


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
def test_gradients_that_are_one_tensor_are_summed_apart(make, name):
    case = make(name, workers=3, microbatches=4, units=6, sizes=(2,), optimizer=Sgd(lr=0.1))
    for n in (1, 2, 3):
        case.units[n] = (f"u{n}", Shift())
    assert case.furthest(case.trained_plainly()) <= case.tolerance


def test_recomputing_finds_samples_that_were_brought_in_ahead(make):
    plan = make("hyscale", workers=2, microbatches=4).plan
    case = make("hyscale", workers=2, microbatches=4, order=plan.order.replace(recompute=1.0))
    assert case.plan.prefetches_data
    assert case.furthest(case.trained_plainly()) <= case.tolerance
