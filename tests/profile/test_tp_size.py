"""What the division of operators needs: degrees that divide some, and the all-reduces that a run really sends."""

import pytest
import torch

from pipedejavu.engine.threads import Threads
from pipedejavu.plan.plan_trait import division_of
from pipedejavu.profile import UnitSample
from pipedejavu.profile.tp_size import with_divided_sums, with_divisions
from pipedejavu.program.unit_traffic import unit_collectives
from tests.engine.case import mlp, mlp_samples, profile_of, sum_of_losses
from tests.engine.divided_case import MODELS, divided_case


@pytest.fixture(autouse=True)
def _float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def sample(model: str, units: list | None = None) -> UnitSample:
    build, make_samples = {**MODELS, "mlp": (mlp, mlp_samples)}[model]
    samples = make_samples([4], torch.Generator().manual_seed(0))
    return UnitSample(units or build(4), samples.inputs(0), samples.targets(0), sum_of_losses)


def divisions(model: str) -> tuple[tuple[int, ...] | None, dict[str, tuple[int, ...]]]:
    units = sample(model)
    profile = with_divisions(profile_of(units.units, 0), units)
    return profile.tp_sizes, profile.layout_sizes


def test_degrees_are_those_that_divide_an_operator() -> None:
    assert divisions("mlp") == ((), {})  # widths of 5 and 3
    assert divisions("wide-mlp") == ((2, 4, 8), {})  # widths of 8
    assert divisions("heads") == ((2, 4, 8), {})  # four heads, and columns of 32; three tokens and seven classes


def test_layouts_are_those_that_the_graph_has() -> None:
    sizes, layouts = divisions("tokens")  # eight tokens and twelve classes
    assert sizes == (2, 4, 8)
    assert layouts == {
        "vocabulary": (2, 4),
        "sequence": (2, 4, 8),
        "sequence+vocabulary": (2, 4),
        "context": (2, 4, 8),
    }


def test_on_cpus_units_that_draw_numbers_are_not_divided() -> None:
    class Noisy(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.rand_like(x)

    layers = torch.nn.Linear(5, 8), torch.nn.Linear(8, 3), Noisy(3, 3)
    units = sample("wide-mlp", [(f"u{n}", layer) for n, layer in enumerate(layers)])
    profile = profile_of(units.units, 0)
    assert with_divisions(profile, units, draws_alike=False).tp_sizes == ()
    assert with_divisions(profile, units).tp_sizes == (2, 4, 8)


VOLUMES = {"all-reduce": 2, "all-gather": 1, "all-to-all": 1}
"""Bytes that a worker sends, as multiples of (n - 1) / n times what it puts in."""


@pytest.mark.parametrize(
    ("model", "shards", "layout", "off"),
    [
        ("heads", 2, "", 1e-9),
        ("wide-mlp", 4, "", 1e-9),
        ("filters", 2, "", 1e-9),
        ("filters", 2, "stationary-x", 1e-9),
        ("tokens", 2, "sequence", 0.1),
        ("tokens", 2, "vocabulary", 0.1),
        ("tokens", 4, "sequence+vocabulary", 0.1),
        ("tokens", 2, "context", 0.1),
    ],
)
def test_the_bytes_of_a_forecast_are_those_that_a_run_sends(model: str, shards: int, layout: str, off: float) -> None:
    """Without the few numbers per token that a divided loss exchanges."""
    is_along = layout != "" and not layout.startswith("stationary")
    options = {"layouts": tuple(layout.split("+"))} if is_along else {"layout": layout}
    case = divided_case(model, shards=shards, rounds=1, **options)
    plan = case.program.plan
    division = division_of(plan)
    assert division == f"{layout or 'pairs'}/{shards}"
    profile = with_divided_sums(profile_of(case.units, len(case.job.ties)), sample(model, case.units), division)
    rows = [
        VOLUMES[row.kind] * row.size_bytes(4)
        for unit in profile.units
        for is_backward in (False, True)
        for row in unit_collectives(plan.cut.layouts, shards, unit, is_backward=is_backward)
    ]
    threads = Threads(case.program, case.job, case.batches)
    before = [handlers.wire.traffic()[1] for handlers in threads.handlers]
    threads.run()
    sent = [handlers.wire.traffic()[1] - size for handlers, size in zip(threads.handlers, before, strict=True)]
    expected = plan.feed.microbatches * sum(rows) * (shards - 1) / shards
    assert rows
    assert sent == pytest.approx([expected] * shards, rel=off)
