"""Questions whose answers are known."""

import pytest

from pipedejavu.facts import InputError
from pipedejavu.program import compile as compile_plan
from pipedejavu.program import verify
from pipedejavu.search import Options, search
from pipedejavu.simulate import simulate
from tests.search.case import machine, profile


def test_every_candidate_compiles_verifies_and_simulates_as_it_says() -> None:
    result = search(profile([1e-3] * 6), machine(["fast"] * 4), Options(batch=8))
    assert len(result.candidates) > 1
    assert result.is_complete
    for found in result.candidates:
        program = compile_plan(found.plan, found.profile, found.machine)
        assert simulate(program, verify(program)).makespan_s == pytest.approx(found.time_s)
        assert all(need.share <= 1 for need in found.memory)
    assert [c.time_s for c in result.candidates] == sorted(c.time_s for c in result.candidates)


def test_with_infinite_bandwidth_and_memory_data_parallel_wins() -> None:
    result = search(profile([1e-3, 3e-3, 2e-3]), machine(["fast"] * 4), Options(batch=8, is_runnable=True))
    assert result.best is not None
    assert result.best.plan.place.replicas == 4
    assert result.best.time_s == pytest.approx(2 * 18e-3)  # a quarter of the batch, forward and backward


def test_a_profile_without_times_on_the_machine_is_refused() -> None:
    with pytest.raises(InputError, match="has no times on 'slow', the devices of machine 'test'; profile the model"):
        search(profile([1e-3]), machine(["slow"]))


def test_options_that_disagree_are_refused() -> None:
    with pytest.raises(InputError, match="microbatches of 3 samples do not make up a batch of 8"):
        search(profile([1e-3]), machine(["fast"]), Options(batch=8, samples=3))
    with pytest.raises(InputError, match="objective 'price' needs the price"):
        search(profile([1e-3]), machine(["fast"]), Options(objective="price"))
