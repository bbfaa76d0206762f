"""The bench of cuts: the analytical cut gives a worker that is slower fewer units, and the equal one does not."""

import pytest

torch = pytest.importorskip("torch")

from tests.script import load_script
from tests.search.case import profile

script = load_script("cuts")


def test_a_worker_that_is_three_times_slower_gets_a_third_of_the_work():
    model = script.with_slow(profile([1e-3] * 8), 3.0)
    found = script.programs(model, samples=1)
    assert found["equal"].plan.cut.bounds == (4,)
    assert found["analytical"].plan.cut.bounds == (6,)
    assert list(found["analytical"].devices) == ["fast", "slow"]
