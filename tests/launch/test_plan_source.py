"""Where the plan of a run comes from, fact by fact."""

import pytest

pytest.importorskip("torch")

from pipedejavu.launch import PlanSource, StartFacts, choose_source


@pytest.mark.parametrize(
    ("facts", "source"),
    [
        pytest.param({}, PlanSource.SEARCH, id="a new run with plan auto"),
        pytest.param({"has_workers": True}, PlanSource.REQUEST, id="auto with --workers is data parallel"),
        pytest.param({"is_auto": False, "has_request": True}, PlanSource.REQUEST, id="a plan by name"),
        pytest.param({"num_processes": 2}, PlanSource.REQUEST, id="auto under torchrun is data parallel"),
        pytest.param({"known_workers": 2}, PlanSource.RUN, id="a resumed run keeps its plan"),
        pytest.param({"known_workers": 2, "has_request": True}, PlanSource.SEARCH, id="unless auto is asked for"),
        pytest.param(
            {"known_workers": 2, "has_request": True, "is_auto": False}, PlanSource.REQUEST, id="or another plan"
        ),
        pytest.param(
            {"known_workers": 2, "num_processes": 2, "has_request": True},
            PlanSource.RUN,
            id="auto keeps it in torchrun",
        ),
        pytest.param({"known_workers": 2, "num_processes": 3}, PlanSource.FIT, id="another number of processes"),
        pytest.param(
            {"known_workers": 2, "num_processes": 3, "is_sync": False},
            PlanSource.REQUEST,
            id="which only sync plans fit",
        ),
        pytest.param(
            {"known_workers": 2, "num_processes": 2, "switch_workers": 2}, PlanSource.SWITCH, id="a switch was begun"
        ),
        pytest.param(
            {"known_workers": 2, "num_processes": 2, "switch_workers": 1}, PlanSource.RUN, id="for other processes"
        ),
        pytest.param({"known_workers": 2, "switch_workers": 2}, PlanSource.RUN, id="a switch is for torchrun alone"),
    ],
)
def test_where_the_plan_comes_from(facts: dict, source: PlanSource) -> None:
    assert choose_source(StartFacts(**facts)) is source
