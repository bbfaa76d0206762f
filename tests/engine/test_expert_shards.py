"""Training with divided experts, against a plain loop with all experts in one process."""

import pytest


from pipedejavu.engine import AdamW, Sgd
from tests.engine.case import make_case


@pytest.mark.parametrize("shards", [2, 4])
def test_divided_experts_train_as_all_of_them_in_one_process(shards: int):
    case = make_case("moe", "moe", workers=shards, microbatches=2, rounds=3)
    assert case.furthest(case.trained_plainly()) <= case.tolerance
    assert case.moved() > 1e3 * case.tolerance
    assert case.audit() <= case.tolerance
