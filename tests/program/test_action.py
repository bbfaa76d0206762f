"""Actions print as short text and parse back, one by one and in whole programs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedejavu.facts import InputError
from pipedejavu.plan import presets
from pipedejavu.program import (
    ACTION_KINDS,
    VALUE_KINDS,
    Action,
    ActionKind,
    UpdatePlace,
    Value,
    ValuePlace,
    Via,
    parse_action,
)
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import unit_costs

numbers = st.integers(-1, 10**6)
actions = st.builds(
    Action,
    kind=st.sampled_from(ActionKind),
    piece=st.integers(0, 10**6),
    replica=st.integers(0, 10**4),
    microbatch=numbers,
    version=numbers,
    what=st.sampled_from([None, *VALUE_KINDS]),
    via=st.one_of(
        st.builds(Via.to_worker, st.integers(0, 9999)),
        st.builds(Via.from_worker, st.integers(0, 9999)),
        st.builds(Via.among, st.from_regex(r"\A[A-Za-z0-9_.-]+\Z")),
        st.sampled_from(UpdatePlace),
    ),
)


@given(actions)
@settings(derandomize=True, max_examples=300)
def test_what_is_printed_parses_back_to_the_same_action(action):
    parsed = parse_action(str(action))
    assert parsed == action
    assert [type(field) for field in parsed] == [type(field) for field in action]


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(ActionKind.FORWARD, 2, 0, 5, 0), "F2.5@0"),
        (Action(ActionKind.BACKWARD, 2, 1, 5, 0), "B2/1.5@0"),
        (Action.on(ActionKind.SEND, Value.activation(2, 5), Via.to_worker(3)), "SEND:x2.5>3"),
        (Action.on(ActionKind.RECV, Value.gradient(2, 5), Via.from_worker(3)), "RECV:g2.5<3"),
        (Action.on(ActionKind.REDUCE, Value.weight_gradient(2, 0, 0), Via.among("s2")), "REDUCE:d2@0*s2"),
        (Action.update(2, 0, 1, UpdatePlace.HOST), "UPDATE2@1~host"),
        (Action.on(ActionKind.DROP, Value.weights(2, 1, 4)), "DROP:w2/1@4"),
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


def test_an_action_names_its_peer_group_or_place():
    assert parse_action("SEND:x2.5>3").peer == parse_action("RECV:x2.5<3").peer == 3
    assert [parse_action(text).group for text in ("REDUCE:d2@0*s2", "SEND:x2.5>3", "UPDATE2@1~host")] == ["s2", "", ""]
    assert [parse_action(text).update_place for text in ("UPDATE2@1", "UPDATE2@1~server", "F2.5@0")] == [
        UpdatePlace.DEVICE,
        UpdatePlace.SERVER,
        None,
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Value.activation(2, 5), "x2.5"),
        (Value.weights(2, 1, 0, ValuePlace.HOST), "w2/1@0 on the host"),
        (Value.weight_gradient(2, 0, 3, ValuePlace.SHARD), "d2@3 as a shard"),
    ],
)
def test_a_value_prints_its_kind_as_a_letter(value, text):
    assert str(value) == text
    assert value.at(value.number) == value


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
    "SUM:d2@0*s2": "net*s2",
}


@pytest.mark.parametrize("text", LANES)
def test_each_channel_and_group_is_a_lane_of_its_own(text):
    assert parse_action(text).lane == LANES[text]


def test_every_kind_runs_on_some_lane():
    assert {parse_action(text).kind for text in LANES} >= ACTION_KINDS.keys() - {"B", "I", "R"}


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
