"""The key of a model in memory: the same in every process, and another one for whatever changes times."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from pipedejavu.planner.model_key import model_key

FACTOR = 2.0


def scaled_loss(output, target):
    return FACTOR * nn.functional.mse_loss(output, target)


def key(width=4, loss=scaled_loss, samples=2, dropout=0.1, dtype=torch.float32):
    chain = [("one", nn.Linear(3, width)), ("two", nn.Sequential(nn.Dropout(dropout), nn.Linear(width, 3)))]
    chain = [(name, module.to(dtype)) for name, module in chain]
    return model_key(chain, loss, torch.randn(samples, 3), torch.randn(samples, 3))


def test_values_do_not_count() -> None:
    assert key() == key()


def test_what_changes_times_counts() -> None:
    others = [
        key(width=5),
        key(samples=3),
        key(dropout=0.2),
        key(dtype=torch.float64),
        key(loss=nn.MSELoss(reduction="sum")),
        key(loss=nn.MSELoss()),
        key(loss=lambda o, t: scaled_loss(o, t).sqrt()),
        key(loss=lambda o, t: scaled_loss(o, t).square()),
    ]
    assert len({str(other) for other in (key(), *others)}) == 9


def test_shared_parameters_count() -> None:
    """The profile says which weights are tied; that of an untied model would leave their gradients apart."""
    keys = []
    for is_tied in (False, True):
        one, two = nn.Linear(4, 4), nn.Linear(4, 4)
        if is_tied:
            two.weight = one.weight
        keys.append(model_key([("one", one), ("two", two)], scaled_loss, torch.randn(2, 4), torch.randn(2, 4)))
    assert keys[0] != keys[1]


def test_frozen_parameters_count() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    sample = torch.randn(2, 4), torch.randn(2, 4)
    assert model_key([("one", frozen)], scaled_loss, *sample) != model_key(
        [("one", nn.Linear(4, 4))], scaled_loss, *sample
    )


def test_a_global_that_a_loss_reads_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert key() != before


def test_a_closure_counts() -> None:
    def make(weight):
        return lambda output, target: weight * (output - target).square().sum()

    assert key(loss=make(1.0)) == key(loss=make(1.0))
    assert key(loss=make(1.0)) != key(loss=make(2.0))
    assert key(loss=make(torch.ones(2))) == key(loss=make(torch.zeros(2)))


def test_the_key_is_that_of_another_process() -> None:
    code = "import tests.planner.test_model_key as t; print(sorted(t.key().items()))"
    texts = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert texts == {f"{sorted(key().items())}\n"}
