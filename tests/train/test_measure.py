"""At which sizes of microbatch a plan's model is measured."""

import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from pipedejavu.engine import Job, Sgd
from pipedejavu.plan import preset
from pipedejavu.train.measure import measure


@pytest.mark.parametrize(
    ("plan", "samples", "sizes"),
    [("coarse", 16, [4, 16]), ("coarse", 5, [2, 5]), ("coarse", 2, [2]), ("ddp", 16, [16])],
)
def test_a_plan_that_shares_a_batch_is_measured_at_two_sizes(plan: str, samples: int, sizes: list[int]) -> None:
    asked = []

    def batch(size: int) -> tuple[Any, Any]:
        asked.append(size)
        return torch.randn(size, 3), torch.randn(size, 3)

    units = [("first", nn.Linear(3, 3)), ("second", nn.Linear(3, 3))]
    job = Job(units=units, loss=lambda output, target: (output - target).square().sum(), optimizer=Sgd(lr=0.1))
    profile = measure("model", job, preset(plan).at(samples=samples), batch, {"cpu": torch.device("cpu")})
    assert list(dict.fromkeys(asked)) == sizes
    assert [unit.times["cpu"].forward.at(samples) > 0 for unit in profile.units] == [True, True]


def test_getting_a_microbatch_is_part_of_the_first_forward() -> None:
    """A data set that takes 20 ms: a sleep never ends early."""

    def batch(size: int) -> tuple[Any, Any]:
        time.sleep(0.02)
        return torch.randn(size, 3), torch.randn(size, 3)

    job = Job(units=[("only", nn.Linear(3, 3))], loss=lambda x, _: x.sum(), optimizer=Sgd(lr=0.1))
    profile = measure("model", job, preset("ddp").at(samples=4), batch, {"cpu": torch.device("cpu")})
    assert profile.units[0].times["cpu"].forward.at(4) >= 0.02
