"""Unit costs: what 'F=1,B=2' means, and what is refused."""

import pytest

from pipedejavu.analysis import verify
from pipedejavu.facts import InputError
from pipedejavu.plan import Order, Plan, preset
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import parse_unit_costs, simulate, unit_costs


def durations(name: str, text: str) -> dict[str, float]:
    """For each kind of action, what one of them takes on the first worker."""
    program = compile_plan(*unit_costs(preset(name).at(workers=2, microbatches=4), parse_unit_costs(text)))
    spans = [s for s in simulate(program, verify(program)).timeline().spans() if s.worker == 0]
    return {s.action.rstrip("0123456789.@/"): s.end_s - s.start_s for s in spans if s.lane == "compute"}


@pytest.mark.parametrize(
    ("text", "halves"),
    [
        ("F=1,B=2", {"F": 1, "I": 1, "W": 1}),
        ("F=2,I=3,W=0.5", {"F": 2, "I": 3, "W": 0.5}),
        ("F=1,B=4,W=1", {"F": 1, "I": 3, "W": 1}),
        ("F=1,B=4,I=1", {"F": 1, "I": 1, "W": 3}),
    ],
)
def test_halves_of_a_backward_follow_from_what_is_given(text, halves):
    durations_s = durations("zb-h1", text)
    assert {kind: durations_s[kind] for kind in "FIW"} == halves


def test_chunks_divide_a_worker_s_cost():
    assert durations("interleaved", "F=1,B=2,U=6") == {"F": 0.5, "B": 1.0, "UPDATE": 3.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F=1;B=2", "'1;B=2' is not a number for unit cost F"),
        ("X=1", "'X=1' is not a unit cost; write F=1,B=2"),
        ("F", "'F' is not a unit cost; write F=1,B=2"),
        ("F=-1", "unit cost F must be 0 or more, not -1"),
        ("F=nan", "unit cost F must be 0 or more, not nan"),
        ("B=3,I=1,W=1", "B must be I \\+ W, and 3 is not 1 \\+ 1"),
    ],
)
def test_other_texts_are_refused(text, message):
    with pytest.raises(InputError, match=message):
        parse_unit_costs(text)


def test_a_half_cannot_exceed_the_whole():
    with pytest.raises(InputError, match="the halves of a backward cannot exceed it: B=2 and W=3"):
        unit_costs(preset("zb-h1").plan, parse_unit_costs("B=2,W=3"))


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (preset("ddp").at(workers=10**12), "has 1,000,000,000,000 workers, servers included; use at most 65,536"),
        (preset("1f1b").at(workers=60_000), "plan '1f1b' has 60,000 stages; use at most 4,096"),
        (preset("gpipe").at(workers=60_000).replace(order=Order(kind="gpipe", is_eager=True)), "use at most 1,024"),
    ],
)
def test_too_many_workers_are_refused(plan: Plan, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        unit_costs(plan, {})
