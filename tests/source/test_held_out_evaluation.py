"""The figures of an evaluation equal the model's own in eval mode, whole and with a short last batch."""

import math

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import nn
from torch.nn.functional import cross_entropy

from pipedejavu.engine.piece import PieceRunner
from pipedejavu.run import TrainOptions
from pipedejavu.source.held_out_evaluation import Evaluation
from pipedejavu.source.task import prepare

SIZES = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 260, "n_positions": 16}


def forward(evaluation, number):
    value = evaluation.cut.flat(evaluation.inputs(number))
    for n, (name, unit) in enumerate(evaluation.cut.units):
        runner = PieceRunner([(n, name, unit)], seed=0)
        value, _ = runner.forward(runner.initial, value, number, is_first=not n)
    return evaluation.cut.output(value)


def sums(evaluation):
    with torch.no_grad():
        return torch.stack([evaluation.measure(n, forward(evaluation, n)) for n in range(len(evaluation))]).sum(0)


def test_a_model_with_dropout_is_evaluated_without(tmp_path):
    transformers.GPT2Config(**SIZES, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).save_pretrained(tmp_path)
    options = TrainOptions(model=f"hf:{tmp_path}", data="random:40", eval=7)
    order = prepare(options, (4,)).batches
    assert (len(order.task.data), len(order.task.held_out)) == (33, 7)
    evaluation = Evaluation(order.task, order.cut, 4)
    assert [evaluation.size(n) for n in range(len(evaluation))] == [4, 3]
    model = order.task.model
    assert model.training
    result = evaluation.result(sums(evaluation).tolist())
    inputs, targets = order.task.held_out.batch(range(7))
    with torch.no_grad():
        logits = model.eval()(**inputs).logits
    expected = float(cross_entropy(logits.double().flatten(0, 1), targets.flatten()))
    assert result.loss == pytest.approx(expected, rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-5)
    assert result.num_items == targets.numel()
    assert result.accuracy is None


def test_classes_have_an_accuracy():
    order = prepare(TrainOptions(model="mlp", data="digits", eval=0.01), (8,)).batches
    evaluation = Evaluation(order.task, order.cut, 8)
    assert len(order.task.held_out) == 15
    result = evaluation.result(sums(evaluation).tolist())
    inputs, targets = order.task.held_out.batch(range(15))
    assert isinstance(order.task.model, nn.Module)
    with torch.no_grad():
        value = inputs
        for _, unit in order.cut.units:
            value = unit(value)
    assert result.accuracy == pytest.approx(float((value.argmax(1) == targets).double().mean()))
    assert result.loss == pytest.approx(float(cross_entropy(value.double(), targets)), rel=1e-6)
    assert result.perplexity is None
