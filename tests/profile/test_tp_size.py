"""What the division of operators needs: degrees that divide some, and the all-reduces that a run really sends."""

import pytest
import torch

from pipedejavu.engine.threads import Threads
from pipedejavu.plan.plan_trait import division_of
from pipedejavu.profile.tp_size import tp_sizes, with_divided_sums
from pipedejavu.simulate.unit_traffic import unit_collectives
from tests.engine.case import mlp, mlp_samples, profile_of
from tests.engine.divided_case import MODELS, divided_case


@pytest.fixture(autouse=True)
def _float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def sample(make_samples) -> torch.Tensor:
    return make_samples([4], torch.Generator().manual_seed(0)).inputs(0)


def test_degrees_are_those_that_divide_an_operator() -> None:
    assert tp_sizes(mlp(4), sample(mlp_samples)) == ()  # widths of 5 and 3
    build, make_samples = MODELS["wide-mlp"]
    assert tp_sizes(build(4), sample(make_samples)) == (2, 4, 8)  # widths of 8
    build, make_samples = MODELS["heads"]
    assert tp_sizes(build(4), sample(make_samples)) == (2, 4, 8)  # four heads, and columns of 32


@pytest.mark.parametrize(
    ("model", "shards", "layout"),
    [("heads", 2, ""), ("wide-mlp", 4, ""), ("filters", 2, ""), ("filters", 2, "stationary-x")],
)
def test_the_bytes_of_a_forecast_are_those_that_a_run_sends(model: str, shards: int, layout: str) -> None:
    case = divided_case(model, shards=shards, layout=layout, rounds=1)
    plan, (_, make_samples) = case.program.plan, MODELS[model]
    division = division_of(plan)
    assert division == f"{layout or 'pairs'}/{shards}"
    profile = with_divided_sums(
        profile_of(case.units, len(case.job.ties)), case.units, sample(make_samples), 4, division
    )
    rows = [
        size
        for unit in profile.units
        for is_backward in (False, True)
        for _, size in unit_collectives(plan, unit, 4, is_backward)
    ]
    threads = Threads(case.program, case.job, case.batches)
    before = [handlers.wire.traffic()[1] for handlers in threads.handlers]
    threads.run()
    sent = [handlers.wire.traffic()[1] - size for handlers, size in zip(threads.handlers, before, strict=True)]
    expected = plan.feed.microbatches * sum(rows) * 2 * (shards - 1) / shards
    assert rows
    assert sent == pytest.approx([expected] * shards)
