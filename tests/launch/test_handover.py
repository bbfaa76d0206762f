"""What a launcher hands to its workers: the same program that it compiled, and the figures of its forecast."""

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.launch.handover import Handover, RunForecast
from pipedejavu.plan import preset
from pipedejavu.probe import read_shape
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import simulate
from pipedejavu.zoo import estimate_profile


def program_of(name: str, **sizes: int) -> Program:
    plan = preset(name).at(**sizes)
    machine = read_shape(plan.num_workers)
    return compile_plan(plan, estimate_profile("gpt-tiny", machine), machine, fold=False)


@pytest.mark.parametrize("name", ["1f1b", "ddp", "chimera", "pipedream", "zeno", "hogwild", "coarse", "zb-h1"])
def test_a_program_that_is_handed_over_is_the_one_that_was_compiled(name: str) -> None:
    program = program_of(name)
    assert Handover.unpack(Handover(program).pack()) == (program, None)


def test_the_forecast_has_the_figures_of_the_prediction() -> None:
    prediction = simulate(program_of("1f1b", workers=2, microbatches=4))
    forecast = Handover.unpack(Handover(prediction.program, RunForecast.of(prediction)).pack()).forecast
    assert forecast is not None
    assert (forecast.makespan_s, forecast.mean_s) == (prediction.makespan_s, prediction.chance.mean_s)
    assert [(w.device, w.busy_s, w.peak_bytes) for w in forecast.workers] == [
        (w.device, w.busy_s, w.peak_bytes) for w in prediction.workers
    ]
