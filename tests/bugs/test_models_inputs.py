"""Models of several inputs on the command line: samples of nested tuples, lists and dicts."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.engine import Threads
from pipedejavu.facts import InputError
from pipedejavu.launch import plan_run
from pipedejavu.plan import preset
from pipedejavu.run import TrainOptions
from pipedejavu.run.run_folder import result_of
from pipedejavu.source.model_source import open_task
from pipedejavu.source.task import prepare

FILE = """
import torch
from torch import nn


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, edges, *, scale):
        for layer in self.layers:
            x = layer(edges["weights"] @ x).tanh() + edges["more"][0] * scale
        return x.mean(1)


class Pair(Graph):
    def forward(self, x, edges):
        return super().forward(x, edges, scale=1.0)


def items(size=24):
    for n in range(size):
        x, y = torch.randn(5, 4), torch.randn(4)
        yield x, {"weights": torch.rand(5, 5), "more": [torch.randn(5, 1), n]}, y


def positional():
    return Pair(), nn.MSELoss(), [((x, edges), y) for x, edges, y in items()]


def named():
    samples = [[{"x": x, "edges": edges, "scale": torch.ones(1, 1)}, {"y": y, "z": -y}] for x, edges, y in items()]
    return Graph(), lambda output, targets: nn.functional.mse_loss(output, targets["y"]), samples


def uneven():
    return Pair(), nn.MSELoss(), [((torch.randn(n, 4), torch.rand(n, n)), torch.randn(4)) for n in range(2, 9)]


def forms():
    return Pair(), nn.MSELoss(), [((x, edges), y) if n % 2 else (x, y) for n, (x, edges, y) in enumerate(items())]
"""


def test_samples_of_several_inputs_train_like_in_a_plain_loop(tmp_path: Path) -> None:
    (tmp_path / "graph.py").write_text(FILE)
    options = TrainOptions(
        model=f"{tmp_path / 'graph.py'}:positional", optimizer="sgd", lr=0.3, dtype="float64", checkpoint_every=0
    )
    options, program, _ = plan_run(options, preset("1f1b").at(workers=2, microbatches=2, samples=3))
    job, batches = prepare(options, program.sizes, program.plan.cut.begins)
    threads, plain = Threads(program, job, batches), open_task(options.model).model
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    for _ in range(2):
        threads.run()
    for step in range(2):
        optimizer.zero_grad()
        for n in (2 * step, 2 * step + 1):
            inputs, targets = batches._batch(n)
            (torch.nn.functional.mse_loss(plain(*inputs), targets) / 2).backward()
        optimizer.step()
    expected = dict(plain.named_parameters())
    trained = result_of(program, threads.outcome().weights)
    assert trained.keys() == expected.keys()
    for name, weight in trained.items():
        assert torch.allclose(weight, expected[name], rtol=0, atol=1e-12), name


def test_samples_may_be_lists_of_dicts(tmp_path: Path) -> None:
    (tmp_path / "graph.py").write_text(FILE)
    options = TrainOptions(model=f"{tmp_path / 'graph.py'}:named")
    job, batches = prepare(options, (3,))
    task, (inputs, targets) = batches.task, batches._batch(0)
    value = batches.inputs(0)
    for _, unit in job.units:
        value = unit(value)
    expected = torch.nn.functional.mse_loss(task.model(**inputs), targets["y"])
    assert job.loss(value, batches.targets(0)).item() / batches.count(0) == pytest.approx(expected.item(), rel=1e-6)
    assert batches.count(0) == batches.length(0) == 3


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("uneven", "the samples of the dataset cannot be stacked: stack expects each tensor to be equal size"),
        ("forms", "the samples of the dataset do not all hold the same tuples, lists and dicts; give all one form"),
    ],
)
def test_samples_that_do_not_stack_are_refused(function, said, tmp_path: Path) -> None:
    (tmp_path / "graph.py").write_text(FILE)
    with pytest.raises(InputError, match=said):
        open_task(f"{tmp_path / 'graph.py'}:{function}")
