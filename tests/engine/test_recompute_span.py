"""Units that are recomputed beside others that are kept: the same bits, and only they run again."""

from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import nn

from pipedejavu.engine import AdamW
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.recompute_span import backward, backward_input, backward_weights
from pipedejavu.engine.threads import Threads
from pipedejavu.plan import Keep

runs: list[int] = []
"""The numbers of units, as often as they ran forward."""


@pytest.fixture(autouse=True)
def _no_runs():
    runs.clear()


class Noisy(nn.Sequential):
    """Has running statistics and dropout, and tells when it runs."""

    def __init__(self, number, last=False):
        super().__init__(
            nn.Linear(5, 3 if last else 5), *[nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Tanh()][: 3 * (not last)]
        )
        self.number = number

    def forward(self, x):
        runs.append(self.number)
        return super().forward(x)


def noisy(make, name, units=8, **changes):
    case = make(name, units=units, optimizer=AdamW(lr=0.01, weight_decay=0.1), **changes)
    plan = case.plan.replace(bucket_bytes=2**30)  # stages of one piece
    return replace(case, plan=plan, units=[(f"u{n}", Noisy(n, n == units - 1)) for n in range(units)])


def trained(case, **order):
    """Returns all that a case with another order ends with: weights, running statistics and losses."""
    case = replace(case, plan=case.plan.replace(order=case.plan.order.replace(**order)))
    threads = Threads(case.program, case.job, case.batches)
    threads.run()
    found = {(home, n): w for home, weights in threads.outcome().weights.items() for n, w in weights.items()}
    for own in threads.handlers:
        found |= {("loss", number): torch.tensor(loss) for number, loss in own.log.losses.items()}
        for home, runner in own.runners.items():
            buffers = ((unit, n, b) for unit, _, module in runner.units for n, b in module.named_buffers())
            found |= {(home, unit, n): buffer for unit, n, buffer in buffers}
    return found, case


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    assert [key for key, tensor in found.items() if not torch.equal(tensor, expected[key])] == []


PRESETS = [
    ("gpipe", {"workers": 2, "microbatches": 3}),
    ("1f1b", {"workers": 2, "microbatches": 3}),
    ("interleaved", {"workers": 2, "microbatches": 4}),
    ("zb-h1", {"workers": 2, "microbatches": 4}),
    ("zb-v", {"workers": 2, "microbatches": 4, "units": 12}),
    ("chimera", {"workers": 2, "microbatches": 4}),
    ("axonn", {"workers": 2, "microbatches": 4}),
    ("pipedream", {"workers": 2, "microbatches": 4}),
    ("hyscale", {"workers": 2, "microbatches": 4}),
]
SOME = [{"recompute_units": (0, 2, 3, 7)}, {"recompute_units": (1, 6)}, {"recompute": 0.5}]


@pytest.mark.parametrize("order", SOME, ids=str)
@pytest.mark.parametrize(("name", "sizes"), PRESETS)
def test_recomputing_some_units_changes_no_bit_and_runs_no_others_again(make, name, sizes, order):
    case = noisy(make, name, **sizes)
    expected, plain = trained(case)
    once = Counter(runs)
    runs.clear()
    found, some = trained(case, **order)
    assert_same_bits(found, expected)
    again = {unit for units in some.program.recomputed for unit in units}
    assert 0 < len(again) < len(case.units)
    assert any(units and some.program.keeps_saved(piece) for piece, units in enumerate(some.program.recomputed))
    assert Counter(runs) == Counter({unit: count * (1 + (unit in again)) for unit, count in once.items()})
    # Every replica runs the units of its own microbatches alone.
    assert {*once.values()} == {plain.program.update_size * plain.updates}


@pytest.mark.parametrize(("name", "sizes"), [("1f1b", PRESETS[1][1]), ("zb-h1", PRESETS[3][1])])
def test_checkpoints_divide_a_recomputed_stage_and_change_nothing(make, name, sizes):
    case = make(name, "convnet", units=9, optimizer=AdamW(lr=0.01), **sizes)
    order = case.plan.order.replace(recompute_units=(0, 1, 2, 5, 6, 7), checkpoints=(2, 3, 6, 8))
    case = replace(case, plan=case.plan.replace(order=order, cut=case.plan.cut.replace(bounds=(4,))))
    assert [[*piece.units] for piece in case.program.pieces] == [[0, 1], [2], [3], [4, 5], [6, 7], [8]]
    first = [str(a) for a in case.program.workers[0].actions if a.kind in ("R", "B", "I") and a.microbatch == 0]
    assert [text[0] for text in first] == ([*"BRBRB"] if name == "1f1b" else [*"IRIRI"])
    plain = case.plan.order.replace(recompute_units=None, checkpoints=None)
    found, expected = (
        {key[1:]: tensor for key, tensor in trained(one)[0].items()}
        for one in (case, replace(case, plan=case.plan.replace(order=plain)))
    )
    assert_same_bits(found, expected)
    assert case.furthest(case.trained_plainly()) <= case.tolerance
    assert case.audit() <= case.tolerance


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("units", [(0,), (1, 4), (5,), (1, 2, 3, 4)])
def test_weights_that_are_tied_within_a_stage_and_across_stages(make, name, units):
    for workers in (1, 2):
        case = make(name, "gpt", workers=workers, microbatches=3, units=6)
        assert_same_bits(trained(case, recompute_units=units)[0], trained(case)[0])


def test_early_recompute_needs_what_the_forward_left(make):
    case = noisy(make, "1f1b", workers=2, microbatches=3)
    assert_same_bits(trained(case, recompute=0.5, recomputes_early=True)[0], trained(case)[0])


@pytest.mark.parametrize(
    "keep", [Keep(activations="host"), Keep(kind="host", window=1)], ids=["activations", "weights"]
)
def test_what_waits_on_the_host_comes_back_for_the_units_that_run_again(make, keep):
    case = noisy(make, "gpipe", workers=2, microbatches=3, keep=keep)
    found, some = trained(case, recompute_units=(0, 2, 3, 7))
    assert {a.kind for worker in some.program.workers for a in worker.actions} >= {"R", "FETCH"}
    assert_same_bits(found, trained(case)[0])


def test_a_run_that_some_units_recompute_is_its_replay(make):
    case = make("zb-h1", "convnet", workers=2, microbatches=3, units=6)
    case = replace(case, plan=case.plan.replace(order=case.plan.order.replace(recompute_units=(1, 3, 5))))
    assert case.furthest(case.trained_plainly()) <= case.tolerance
    assert case.audit() <= case.tolerance


# A piece alone, with what a model may do to its values and weights.


class Mix(nn.Module):
    """Reads a value that has skipped units, thrice, and a weight that others read too; hands both values on."""

    def __init__(self, shared):
        super().__init__()
        self.shared, self.own = shared, nn.Linear(4, 4)

    def forward(self, pair):
        x, skip, index = pair
        y = torch.tanh(self.own(x) + skip.square()) @ self.shared
        return torch.relu_(y * skip) @ self.shared, skip, index


class Enter(nn.Module):
    def forward(self, x):
        return torch.sin(x), torch.cos(x), torch.arange(3)


class Leave(nn.Module):
    def forward(self, pair):
        x, skip, _ = pair
        return x + skip


def mixed_units():
    torch.manual_seed(1)
    shared = nn.Parameter(torch.randn(4, 4))
    modules = [Enter(), Mix(shared), Mix(shared), Mix(shared), Leave(), nn.ReLU(inplace=True)]
    return [(n, f"u{n}", module) for n, module in enumerate(modules)]


def through(again, is_first, is_split):
    """Runs two microbatches, in float32, through a piece; returns all gradients."""
    runner = PieceRunner(mixed_units(), 3, again)
    weights = {n: w.clone().requires_grad_() for n, w in runner.initial.items()}
    total, passed = None, []
    for microbatch in range(2):
        torch.manual_seed(microbatch)
        output, saved = runner.forward(weights, torch.randn(3, 4), microbatch, is_first=is_first)
        if 0 < len(again) < len(runner.units):
            assert [bool(recompute_span.outputs) for recompute_span in saved].count(False) == rows(again)
            saved = runner.forward_again(weights, saved, microbatch)[1]
        heads = (torch.randn_like(output),)
        if is_split:
            gone, half = backward_input(saved, heads)
            total = backward_weights(half, total)
        else:
            gone, total = backward(saved, heads, total)
        assert all(
            t.grad is None
            for recompute_span in saved
            for t in (*recompute_span.inputs, *recompute_span.weights.values())
        )
        passed += gone
    assert [*total] == [*runner.initial]
    return {**total, **dict(enumerate(passed))}


def rows(again):
    return sum(n - 1 not in again for n in again)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_gradients_of_any_choice_of_units_are_those_of_the_whole(is_first, is_split):
    torch.set_default_dtype(torch.float32)
    expected = through((), is_first, is_split)
    assert sum(float(g.abs().sum()) > 1 for n, g in expected.items() if isinstance(n, str)) > 4
    for count in range(1, 7):
        for again in combinations(range(6), count):
            assert_same_bits(through(again, is_first, is_split), expected)
