"""At which sizes of microbatch a plan's model is measured."""

import subprocess
import sys
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from pipedejavu.engine import Job, Sgd
from pipedejavu.facts import Cost
from pipedejavu.plan import preset
from pipedejavu.planner.measure import measure
from pipedejavu.planner.planning import most_samples
from pipedejavu.planner.profiling import MeasureSetup


@pytest.mark.parametrize(
    ("plan", "samples", "sizes"),
    [
        ("coarse", 16, [1, 4, 16]),
        ("coarse", 5, [1, 2, 5]),
        ("coarse", 2, [1, 2]),
        ("coarse", 1, [1]),
        ("ddp", 16, [16]),
    ],
)
def test_a_plan_that_shares_a_batch_is_measured_at_smaller_sizes_too(plan: str, samples: int, sizes: list[int]) -> None:
    asked = []

    def batch(size: int) -> tuple[Any, Any]:
        asked.append(size)
        return torch.randn(size, 3), torch.randn(size, 3)

    units = [("first", nn.Linear(3, 3)), ("second", nn.Linear(3, 3))]
    job = Job(units=units, loss=lambda output, target: (output - target).square().sum(), optimizer=Sgd(lr=0.1))
    profile = measure("model", job, preset(plan).at(samples=samples), batch, len, {"cpu": torch.device("cpu")})
    assert list(dict.fromkeys(asked)) == sizes
    assert [unit.times["cpu"].forward.at(samples) > 0 for unit in profile.units] == [True, True]


def test_one_sample_is_left_out_where_batch_statistics_refuse_it() -> None:
    job = Job(units=[("only", nn.BatchNorm1d(3))], loss=lambda x, _: x.sum(), optimizer=Sgd(lr=0.1))

    def forward(samples: int) -> Cost:
        plan, kinds = preset("coarse").at(samples=samples), {"cpu": torch.device("cpu")}
        profile = measure("m", job, plan, lambda n: (torch.randn(n, 3), torch.zeros(n)), len, kinds)
        return profile.units[0].times["cpu"].forward

    found = forward(8)
    assert 1 not in found.measured_s
    assert found.at(8) > 0
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        forward(1)


@pytest.mark.parametrize(("plan", "sizes"), [("ddp", [4]), ("coarse", [1, 4])])
def test_getting_a_microbatch_is_part_of_the_first_forward(plan: str, sizes: list[int]) -> None:
    """A data set that takes 20 ms: a sleep never ends early."""

    made: list[range] = []

    def make(numbers: range) -> None:
        made.append(numbers)
        time.sleep(0.02)

    def batch(size: int) -> tuple[Any, Any]:
        return torch.randn(size, 3), torch.randn(size, 3)

    job = Job(units=[("only", nn.Linear(3, 3))], loss=lambda x, _: x.sum(), optimizer=Sgd(lr=0.1))
    profile = measure("model", job, preset(plan).at(samples=4), batch, make, {"cpu": torch.device("cpu")})
    for size in sizes:
        assert profile.units[0].times["cpu"].forward.at(size) >= profile.batch["cpu"].at(size) >= 0.02
        numbers = [n for own in made if len(own) == size for n in own]
        assert len({*numbers}) == len(numbers) > size, "samples that were just made are in a cache"


STEP = """
import sys, torch
from pipedejavu.engine.device import be_deterministic
from pipedejavu.session import Trainer

be_deterministic()
model, batch = torch.nn.Sequential(torch.nn.Linear(2, 2)), (torch.ones(4, 2), torch.ones(4, 2))
Trainer(model, lambda y, x: (y - x).square().sum(), sample=batch, plan="ddp", workers=1).step(batch)
assert torch.are_deterministic_algorithms_enabled()
print(*({"torch._dynamo", "torch._inductor"} & sys.modules.keys()))
"""


def test_who_measures_and_trains_a_chain_does_not_load_a_compiler() -> None:
    """It takes longer to load than all the rest of a start, in every worker."""
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_machines_with_a_gpu_measure_larger_microbatches() -> None:
    cpu = MeasureSetup("cpu", torch.device("cpu"), 2)
    gpu = MeasureSetup("h200", torch.device("cuda"), 2)
    assert [most_samples(batch, [cpu]) for batch in (2, 8, 100)] == [2, 8, 8]
    assert [most_samples(batch, [cpu, gpu]) for batch in (2, 8, 100)] == [2, 8, 32]
