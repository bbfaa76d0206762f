"""The share that a plan chooses is the best of all that it could have chosen, as the simulator sees them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedejavu.analysis import verify
from pipedejavu.facts import Cost
from pipedejavu.plan import Version, preset
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import simulate
from tests.program.test_share import host, model

RATES = st.floats(1e-4, 1e-1)
FIXED = st.sampled_from([0.0, 1e-3, 2e-2])
BENDS = st.sampled_from([{}, {1: 0.5, 4: 1.0}, {1: 1.0, 4: 1.5}])
"""How many times as long as the line microbatches of some sizes take."""


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    fast=st.tuples(FIXED, RATES),
    slow=st.tuples(FIXED, RATES),
    bend=BENDS,
    size=st.sampled_from([10**4, 10**6, 10**8]),
    update_s=st.sampled_from([0.0, 0.01, 0.1]),
    sizes=st.sampled_from([(1, 12), (3, 4), (6, 2)]),
)
def test_the_chosen_split_is_the_best_of_all_that_are_simulated(fast, slow, bend, size, update_s, sizes) -> None:
    lines = [Cost(fixed_s=fixed, per_sample_s=rate) for fixed, rate in (fast, slow)]
    costs = [line.replace(measured_s={n: line.at(n) * factor for n, factor in bend.items()}) for line in lines]
    profile, machine = model(*costs, gradient_bytes=size, slow_update_s=update_s), host()
    plan = preset("coarse").at(workers=1, microbatches=sizes[0], samples=sizes[1])

    def makespan_s(shares: tuple[float, ...] | None) -> float:
        program = compile_plan(plan.replace(feed=plan.feed.replace(shares=shares)), profile, machine, fold=False)
        return simulate(program, verify(program)).makespan_s

    total = sizes[0] * sizes[1]
    all_s = [makespan_s(((total - n) / total, n / total)) for n in range(total + 1)]
    assert makespan_s(None) == pytest.approx(min(all_s), rel=1e-9)


@settings(max_examples=20, derandomize=True, deadline=None)
@given(
    fast=st.tuples(FIXED, RATES),
    slow=st.tuples(FIXED, RATES),
    size=st.sampled_from([10**4, 10**6, 10**7]),
    update_s=st.sampled_from([0.0, 0.01, 0.1]),
)
def test_the_chosen_late_share_makes_the_shortest_updates_of_all(fast, slow, size, update_s) -> None:
    costs = [Cost(fixed_s=fixed, per_sample_s=rate) for fixed, rate in (fast, slow)]
    profile, machine = model(*costs, gradient_bytes=size, slow_update_s=update_s), host()
    plan = preset("coarse").at(workers=1, microbatches=1, samples=12).replace(version=Version(kind="late"))

    def update_s_of(shares: tuple[float, ...] | None) -> float:
        def makespan_s(steps: int) -> float:
            more = plan.replace(feed=plan.feed.replace(shares=shares), steps=steps)
            program = compile_plan(more, profile, machine, fold=False)
            return simulate(program, verify(program)).makespan_s

        return makespan_s(9) - makespan_s(8)  # the first updates begin with nothing under way

    all_s = [update_s_of(((12 - n) / 12, n / 12)) for n in range(13)]
    assert update_s_of(None) == pytest.approx(min(all_s), rel=1e-9)


@pytest.mark.parametrize("slowness", [0.5, 1.0, 3.0, 10.0, 1000.0])
def test_no_share_beside_a_pipeline_is_much_better_than_the_chosen_one(slowness: float) -> None:
    costs = [Cost(per_sample_s=1e-3), Cost(per_sample_s=1e-3 * slowness)]
    profile, base = model(*costs, gradient_bytes=10**4), host()
    gpus = tuple(base.devices[0].replace(name=f"gpu{n}") for n in range(2))
    machine = base.replace(devices=(*gpus, base.devices[1]))
    plan = preset("coarse").at(workers=2, microbatches=8, samples=4)

    def makespan_s(shares: tuple[float, ...] | None) -> float:
        program = compile_plan(plan.replace(feed=plan.feed.replace(shares=shares)), profile, machine, fold=False)
        return simulate(program, verify(program)).makespan_s

    best = min(makespan_s(((32 - n) / 32, n / 32)) for n in range(33))
    # Of a pipeline only the slowest stage counts for all microbatches; its estimate may be off by one of them.
    one = costs[0].at(4) / 2
    assert makespan_s(None) <= best + one
