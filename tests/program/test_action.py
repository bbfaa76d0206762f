"""Actions print as short text and parse back, one by one and in whole programs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedejavu.facts import InputError
from pipedejavu.plan import presets
from pipedejavu.program import KINDS, WHATS, Action, parse_action
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import unit_costs

numbers = st.integers(-1, 10**6)
actions = st.builds(
    Action,
    kind=st.sampled_from(sorted(KINDS)),
    piece=st.integers(0, 10**6),
    replica=st.integers(0, 10**4),
    microbatch=numbers,
    version=numbers,
    what=st.sampled_from(["", *WHATS]),
    via=st.one_of(
        st.just(""),
        st.builds(lambda way, n: f"{way}{n}", st.sampled_from("<>"), st.integers(0, 9999)),
        st.from_regex(r"\A\*[A-Za-z0-9_.-]+\Z"),
        st.sampled_from(["~host", "~shard", "~server", "~shared"]),
    ),
)


@given(actions)
@settings(derandomize=True, max_examples=300)
def test_what_is_printed_parses_back_to_the_same_action(action):
    assert parse_action(str(action)) == action


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action("F", 2, 0, 5, 0), "F2.5@0"),
        (Action("B", 2, 1, 5, 0), "B2/1.5@0"),
        (Action("SEND", 2, 0, 5, -1, "x", ">3"), "SEND:x2.5>3"),
        (Action("RECV", 2, 0, 5, -1, "g", "<3"), "RECV:g2.5<3"),
        (Action("REDUCE", 2, 0, -1, 0, "d", "*s2"), "REDUCE:d2@0*s2"),
        (Action("UPDATE", 2, 0, -1, 1, "", "~host"), "UPDATE2@1~host"),
        (Action("DROP", 2, 1, -1, 4, "w"), "DROP:w2/1@4"),
    ],
)
def test_the_text_is_the_documented_one(action, text):
    assert str(action) == text
    assert parse_action(f" {text}\n") == action


@pytest.mark.parametrize(
    "text", ["", "F", "X2.5", "F2.5@", "SEND:q2.5>3", "SEND:x2.5>", "SEND:x2.5>a", "F-1", "F2 .5", "F2.5@0!", "f2"]
)
def test_other_text_is_refused(text):
    with pytest.raises(InputError) as caught:
        parse_action(text)
    assert str(caught.value) == f"'{text}' is not an action; it looks like F2.5@0 or SEND:x2.5>3"


LANES = {
    "F2.5@0": "compute",
    "W2.5@0": "compute",
    "EVAL2@0": "compute",
    "DROP:w2@0": "compute",
    "UPDATE2@1": "compute",
    "UPDATE2@1~shard": "compute",
    "UPDATE2@1~host": "host",
    "FETCH:w2@1": "copy-in",
    "OFFLOAD:d2@0": "copy-out",
    "SEND:x2.5>3": "net>3",
    "RECV:x2.5<0": "net<0",
    "REDUCE:d2@0*s2": "net*s2",
    "GATHER:w2@1*s2": "net*s2",
}


@pytest.mark.parametrize("text", LANES)
def test_each_channel_and_group_is_a_lane_of_its_own(text):
    assert parse_action(text).lane == LANES[text]


def test_every_kind_runs_on_some_lane():
    assert {parse_action(text).kind for text in LANES} >= KINDS.keys() - {"B", "I", "R"}


@pytest.mark.parametrize("name", presets())
def test_the_text_of_a_program_gives_the_program_back(name):
    program = compile_plan(*unit_costs(presets()[name].at(microbatches=8), {}), fold=False)
    text = program.to_text()
    again = program.with_text(text)
    assert again == program
    assert again.to_text() == text
    assert len(text.splitlines()) == program.plan.num_workers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w0: F0.0@0\n", "the text has 1 workers, the program 2"),
        ("w0: F0.0@0\nw2: F1.0@0\n", "line 2 must begin with 'w1:', not 'w2: F1.0@0'"),
        ("w0: F0.0@0\nw1 F1.0@0\n", "line 2 must begin with 'w1:', not 'w1 F1.0@0'"),
        ("w0: F0.0@0\nw1: F1.0@0 G\n", "'G' is not an action; it looks like F2.5@0 or SEND:x2.5>3"),
    ],
)
def test_a_text_that_does_not_fit_the_program_is_refused(text, message):
    program = compile_plan(*unit_costs(presets()["gpipe"].at(workers=2, microbatches=1), {}))
    with pytest.raises(InputError) as caught:
        program.with_text(text)
    assert str(caught.value) == message
