import pytest

from pipedejavu.report.label import UNKNOWN, Label, describe, name_in_words, parse_label


@pytest.mark.parametrize(
    ("action", "label", "words"),
    [
        (
            "F2.5@0",
            Label("F", piece=2, microbatch=5, version=0),
            "computes the forward of piece 2, microbatch 5, weights version 0",
        ),
        (
            "B2/1.5@0",
            Label("B", piece=2, replica=1, microbatch=5, version=0),
            "computes the backward of piece 2, replica 1, microbatch 5, weights version 0",
        ),
        (
            "SEND:x2.5>3",
            Label("SEND", "x", piece=2, microbatch=5, via=">3"),
            "sends the activation of piece 2, microbatch 5, to worker 3",
        ),
        (
            "RECV:g3.5<3",
            Label("RECV", "g", piece=3, microbatch=5, via="<3"),
            "receives the gradient of the activation of piece 3, microbatch 5, from worker 3",
        ),
        (
            "REDUCE:d2@0*dp2",
            Label("REDUCE", "d", piece=2, version=0, via="*dp2"),
            "reduces the weight gradient of piece 2, version 0, among group dp2",
        ),
        (
            "UPDATE2@1~host",
            Label("UPDATE", piece=2, version=1, via="~host"),
            "updates the weights of piece 2, writing version 1, on the host",
        ),
        ("DROP:w2@0", Label("DROP", "w", piece=2, version=0), "drops the weights of piece 2, version 0"),
        ("REDUCE:n*all", Label("REDUCE", "n", via="*all"), "reduces the gradient norm, among group all"),
    ],
)
def test_an_action_is_read_and_put_into_words(action: str, label: Label, words: str) -> None:
    assert parse_label(action) == label
    assert describe(label) == words


@pytest.mark.parametrize("action", ["", "</script><img onerror>", "f2.5", "F2.5@0 ", "F٣"])
def test_text_that_is_not_an_action_is_unknown_and_not_an_error(action: str) -> None:
    assert parse_label(action).kind == UNKNOWN
    assert "cannot describe" in describe(parse_label(action))


def test_a_kind_of_a_later_version_keeps_its_parts() -> None:
    assert parse_label("JUMP2.5") == Label("JUMP", piece=2, microbatch=5)
    assert "cannot describe" in describe(parse_label("JUMP2.5"))


@pytest.mark.parametrize(
    ("action", "name"),
    [
        ("F1.3@0", "forward, microbatch 3, stage 1"),
        ("B2/1.5@0", "backward, microbatch 5, stage 2, replica 1"),
        ("SEND:x2.5>3", "send activation, microbatch 5, stage 2"),
        ("UPDATE2@1~host", "update, stage 2"),
        ("REDUCE:n*all", "reduce gradient norm"),
        ("not an action", "action"),
    ],
)
def test_a_bar_has_a_name_in_words(action: str, name: str) -> None:
    assert name_in_words(parse_label(action)) == name
