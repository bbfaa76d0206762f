import pickle
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from pipedejavu.facts import FaultsError, InputError
from pipedejavu.zoo import MODEL_NAMES, build, is_graph_model, order

Tiny = tuple[str, dict[str, Any]]


def test_every_model_learns_a_small_batch(tiny: Tiny) -> None:
    name, options = tiny
    task = build(name, **options)
    inputs, target = task.data.batch(order(0, 0, len(task.data))[:6])
    optimizer = torch.optim.Adam(task.model.parameters(), lr=3e-3)
    losses = []
    for _ in range(25):
        loss = task.loss(task.model(inputs), target) / task.count(target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.75 * losses[0]


def test_a_divided_batch_has_the_same_sums_and_gradients(tiny: Tiny) -> None:
    name, options = tiny
    task = build(name, **options)
    model = task.model.double().eval()  # in training BatchNorm counts over each microbatch

    def gradients(*parts: range) -> tuple[float, int, list[torch.Tensor]]:
        model.zero_grad()
        total, num = 0.0, 0
        for part in parts:
            inputs, target = task.data.batch(part)
            if isinstance(inputs, torch.Tensor) and inputs.is_floating_point():
                inputs = inputs.double()
            loss = task.loss(model(inputs), target)
            loss.backward()
            total, num = total + float(loss.detach()), num + task.count(target)
        return total, num, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    whole, num_whole, gradients_whole = gradients(range(7))
    parts, num_parts, gradients_parts = gradients(range(1), range(1, 4), range(4, 7))
    assert parts == pytest.approx(whole, rel=1e-13)
    assert num_parts == num_whole
    for one, other in zip(gradients_whole, gradients_parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_a_task_survives_pickling(tiny: Tiny) -> None:
    name, options = tiny
    task = build(name, **options)
    again = pickle.loads(pickle.dumps(task))
    inputs, target = task.data.batch([3])
    assert torch.equal(again.loss(again.model(inputs), target), task.loss(task.model(inputs), target))


def test_the_names_are_those_of_the_command_line() -> None:
    assert MODEL_NAMES == (
        "mlp", "vgg19", "vgg-small", "resnet18", "resnet50",
        "gpt-tiny", "gpt-small", "gpt-medium", "gpt-large", "gpt-1.3b", "gpt-6.7b", "gpt-175b",
        "gpt-10-layers", "gpt-10-layers-no-dropout",
        "bert-tiny", "bert-base", "bert-large", "seq2seq-tiny", "seq2seq-base", "moe-tiny", "moe-small",
        "sage", "gcn", "gat", "sage-3",
    )  # fmt: skip


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_every_name_can_be_built(name: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    task = build(name, device="meta", data="graph:power:1000" if is_graph_model(name) else "random")
    assert task.name == name
    _, target = task.data.batch([0])
    assert task.count(target) >= 1


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("gpt-tinny", {}, "there is no model 'zoo:gpt-tinny'; did you mean 'gpt-tiny'?"),
        ("VGG", {}, "there is no model 'zoo:VGG'; did you mean 'vgg19'?"),
        ("gpt-tiny", {"layer": 3}, "zoo:gpt-tiny: unknown key 'layer'; did you mean 'layers'?"),
        (
            "mlp",
            {"widths": [7]},
            "zoo:mlp: widths: Tuple should have at least 2 items after validation, not 1, found [7]",
        ),
        ("mlp", {"widths": [7, 1]}, "zoo:mlp: widths end with 1 class; a loss over classes needs at least 2"),
        ("gpt-tiny", {"heads": 3}, "zoo:gpt-tiny: a width of 128 cannot be divided over 3 heads; change one of them"),
        ("moe-tiny", {"top": 5}, "zoo:moe-tiny: each token visits 5 experts, but there are 4; lower top"),
        (
            "vgg19",
            {"side": 16},
            "zoo:vgg19: 5 stages halve a side of at least 32 pixels, found 16; raise side",
        ),
        (
            "gpt-tiny",
            {"vocabulary": 99},
            "data 'stdlib' needs a vocabulary of 256, found 99; raise vocabulary",
        ),
        (
            "bert-tiny",
            {"vocabulary": 256},
            "data 'stdlib' needs a vocabulary of 257, found 256; raise vocabulary",
        ),
        ("gpt-tiny", {"data": "digits"}, "data 'digits' has images, but the model reads tokens; use stdlib or random"),
        (
            "mlp",
            {"data": "stdlib"},
            "data 'stdlib' has tokens, but the model reads images; use digits, mnist, cifar10 or random",
        ),
        (
            "sage",
            {"data": "digits"},
            "the model reads a graph, and data 'digits' has none; graph networks, such as zoo:sage, take"
            " graph:power:EDGES, graph:stdlib or graph:FOLDER",
        ),
        (
            "sage",
            {"data": "graph"},
            "data 'graph' needs a detail; write graph:power:EDGES, graph:stdlib or graph:FOLDER",
        ),
        (
            "sage",
            {"data": "graph:power:x"},
            "graph:power:EDGES takes a number of edges, found 'x'; write graph:power:100000",
        ),
        ("mlp", {"data": "digit"}, "there is no data 'digit'; did you mean 'digits'?"),
    ],
)
def test_what_cannot_be_built_says_why(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError) as caught:
        build(name, **options)
    assert str(caught.value) == text


def test_all_faults_of_options_come_at_once() -> None:
    with pytest.raises(FaultsError) as caught:
        build("gpt-tiny", layers=0, width="wide", dropout=1.0, is_tide=True, context=float("nan"))
    assert len(caught.value.faults) == 5


def test_an_option_of_a_strange_type_is_a_fault() -> None:
    with pytest.raises(InputError, match="layers: Input should be a valid integer"):
        build("gpt-tiny", layers=object())
