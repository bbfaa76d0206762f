"""The table of filters to drop: each vector's loss is that of a plain loop, and the table goes into a plan."""

import copy
import json
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear
from typer.testing import CliRunner

from pipedejavu.cli.main import app
from pipedejavu.engine import Job, Sgd
from pipedejavu.engine.filter_masks import FilterFinder
from pipedejavu.facts import InputError
from pipedejavu.plan import Plan, preset
from pipedejavu.planner.drop_search import DropTrial, search_drops
from pipedejavu.profile.unit_graph import unit_graphs
from pipedejavu.runtime.kept_filters import KeptFilters
from pipedejavu.source.task import Prepared
from tests.engine.case import convnet_samples, sum_of_losses


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def prepared() -> Prepared:
    units = [
        ("u0", nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU())),
        ("u1", nn.Sequential(nn.Conv2d(6, 4, 3, padding=1), nn.Tanh(), nn.Flatten())),
        ("u2", nn.Linear(36, 3)),
    ]
    job = Job(units=units, loss=sum_of_losses, optimizer=Sgd(lr=0.1, momentum=0.9), seed=3, graphs=unit_graphs)
    return Prepared(job, convnet_samples([5] * 12, torch.Generator().manual_seed(1)))


def test_the_loss_of_a_vector_is_that_of_a_plain_loop(prepared):
    layout = FilterFinder(Plan(), *prepared).layout(0)
    kept = [KeptFilters(layout, (3, 2), (10 + n, 20 + n)) for n in range(5)]
    model = copy.deepcopy(nn.Sequential(*(module for _, module in prepared.job.units)))
    momentum = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for number, filters in enumerate(kept):
        a, b = filters.filters
        hidden = torch.relu(model[0](prepared.batches.inputs(number))[:, a])
        conv = model[1][0]
        hidden = torch.conv2d(hidden * 2, conv.weight[b][:, a], conv.bias[b], padding=1)
        pixels = model[2].weight.view(3, 4, 9)[:, b].reshape(3, -1)
        output = linear(torch.tanh(hidden).flatten(1) * 2, pixels, model[2].bias)
        model.zero_grad()
        cross_entropy(output, prepared.batches.targets(number)).backward()
        first, second = torch.zeros(6, dtype=torch.bool), torch.zeros(4, dtype=torch.bool)
        first[a], second[b] = True, True
        masks = {
            "0.0.weight": first[:, None, None, None], "0.0.bias": first, "1.0.bias": second,
            "1.0.weight": (second[:, None] & first)[:, :, None, None], "2.weight": second.repeat_interleave(9)[None],
        }  # fmt: skip
        for name, p in model.named_parameters():
            trained = masks.get(name, torch.tensor(True)).expand_as(p)
            momentum[name][trained] = 0.9 * momentum[name][trained] + p.grad[trained]
            p.data[trained] -= 0.1 * momentum[name][trained]
    tested = [cross_entropy(model(prepared.batches.inputs(n)), prepared.batches.targets(n)) for n in range(5, 9)]
    found = DropTrial(prepared, 5).loss(kept.__getitem__)
    assert found == pytest.approx(sum(t.item() for t in tested) / 4, abs=1e-12)


def test_a_table_is_a_front_that_goes_into_a_plan(prepared):
    plan = preset("distreal").at(samples=5)
    table = search_drops(prepared, plan, updates=4, population=4, generations=2)
    assert table.groups == ("u0.0.weight", "u1.0.weight")
    costs, losses = [v.cost for v in table.vectors], [v.loss for v in table.vectors]
    assert costs == sorted(costs)
    assert losses == sorted(losses, reverse=True)
    layout = FilterFinder(plan, *prepared).layout(0)
    assert costs == [layout.cost(layout.counts(v.drops)) for v in table.vectors]
    assert table == type(table).from_json(table.to_json())
    made = table.plan(plan)
    assert made.feed.drops == tuple(v.drops for v in table.vectors)
    assert made.decisions[-1].axis == "feed"


def test_a_model_without_filters_has_no_table(prepared):
    flat = [("u0", nn.Sequential(nn.Flatten(), nn.Linear(9, 3)))]
    job = Job(units=flat, loss=sum_of_losses, optimizer=Sgd(lr=0.1), graphs=unit_graphs)
    with pytest.raises(InputError, match="the model has no convolution whose filters can be left out"):
        search_drops(Prepared(job, prepared.batches), preset("distreal").plan, updates=1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("graph.txt", "--search", "genetic"), "--search genetic trains the model, and 'graph.txt' is a profile"),
        (("zoo:mlp", "--search", "genetic", "--machine", "t4"), "trains the model here; leave --machine out"),
        (("zoo:mlp", "--data", "digits"), "--data is for --search genetic"),
    ],
)
def test_what_the_search_cannot_take_is_refused(arguments, sentence):
    done = CliRunner().invoke(app, ["plan", *arguments], standalone_mode=False)
    assert isinstance(done.exception, InputError)
    assert sentence in str(done.exception)


@pytest.mark.slow
def test_the_command_writes_a_plan_with_the_table(tmp_path):
    torch.set_default_dtype(torch.float32)
    file = str(tmp_path / "plan.json")
    arguments = ["plan", "zoo:vgg-small", "--search", "genetic", "--data", "random:64", "--batch", "4"]
    done = CliRunner().invoke(app, [*arguments, "--time-budget", "1", "--out", file, "--json"], standalone_mode=False)
    assert done.exception is None
    form = json.loads(done.stdout)
    assert Plan.load(file).feed.drops == tuple(tuple(vector["drops"]) for vector in form["table"]["vectors"])
