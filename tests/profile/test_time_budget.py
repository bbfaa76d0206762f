"""The budget counts what runs within it, once, and hands out parts of what is left."""

import time

import pytest

pytest.importorskip("torch")

from pipedejavu.facts import InputError
from pipedejavu.profile import TimeBudget


def test_time_outside_does_not_count_and_nested_blocks_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    budget = TimeBudget(10.0)
    now[0] += 100.0
    with budget.spending():
        now[0] += 2.0
        with budget.spending():
            now[0] += 1.0
        assert budget.left_s == 7.0
    now[0] += 100.0
    assert budget.left_s == 7.0
    assert budget.spent_share == pytest.approx(0.3)
    part = budget.part(0.5)
    assert part.left_s == 3.5
    assert part.allows(3.4)
    assert not part.allows(3.5)
    with budget.spending():
        now[0] += 20.0
    assert not part.allows(0.0)
    assert budget.spent_share == 1.0


@pytest.mark.parametrize("total_s", [-1.0, float("inf"), float("nan")])
def test_a_budget_is_a_number_of_seconds(total_s: float) -> None:
    with pytest.raises(InputError, match="measuring may take a number of seconds, 0 or more, not"):
        TimeBudget(total_s)
