"""Replicas that train by themselves and average their weights now and then (local SGD)."""

import copy

import pytest
import torch

from pipedejavu.engine import Sgd, check_runnable
from pipedejavu.facts import InputError
from pipedejavu.plan import Feed, Reduce
from tests.engine.case import sum_of_losses
from tests.engine.test_presets import ADAMW, MOMENTUM


def local(make, model="mlp", *, period, **changes):
    given = {
        "workers": 3,
        "feed": Feed(kind="own"),
        "reduce": Reduce(wire="all-reduce", combiner="average", period=period),
    }
    return make("distreal", model, **given, **changes)


@pytest.mark.parametrize("model", ["mlp", "convnet", "gpt"])
@pytest.mark.parametrize(("period", "steps", "rounds"), [(1, 3, 1), (2, 5, 1), (2, 4, 2), (3, 4, 2)])
def test_local_updates_and_their_averages_equal_their_replay(make, model, period, steps, rounds):
    optimizer = MOMENTUM if model == "mlp" else ADAMW
    case = local(make, model, period=period, steps=steps, rounds=rounds, optimizer=optimizer)
    assert case.audit() <= case.tolerance
    assert case.moved() > 1e6 * case.tolerance


def test_every_second_update_all_replicas_are_the_mean_of_their_own_training(make):
    case = local(make, period=2, steps=2, optimizer=Sgd(lr=0.1))
    trained = []
    for replica in range(3):
        modules = copy.deepcopy([module for _, module in case.units])
        parameters = [p for module in modules for p in module.parameters()]
        for update in range(2):
            number = 3 * update + replica
            loss = sum_of_losses(case.forward(modules, number), case.batches.targets(number))
            for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p.data -= 0.1 * g / case.batches.count(number)
        trained.append([p.detach() for p in parameters])
    mean = [torch.stack(found).mean(0) for found in zip(*trained, strict=True)]
    for weights in case.outcome.weights.values():
        assert all(
            torch.allclose(w, m, rtol=0, atol=case.tolerance) for w, m in zip(weights.values(), mean, strict=True)
        )


def test_replicas_that_have_not_met_yet_are_apart(make):
    case = local(make, period=2, steps=3)
    first, second = (case.outcome.weights[0, replica] for replica in (0, 1))
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_to_average_weights_needs_replicas_with_samples_of_their_own(make):
    case = make("ddp", workers=2, reduce=Reduce(wire="all-reduce", combiner="average"))
    with pytest.raises(InputError, match="the engine does not run combiner 'average' with feed 'microbatch' yet"):
        check_runnable(case.program)
