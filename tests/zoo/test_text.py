import json
import os

import pytest

pytest.importorskip("torch")

import torch

from pipedejavu.facts import InputError
from pipedejavu.zoo.text import LIMIT_BYTES, Text, read_stdlib


def test_the_corpus_begins_with_the_first_sources_and_is_bounded() -> None:
    whole = read_stdlib()
    assert 1 << 20 < len(whole) <= LIMIT_BYTES
    assert read_stdlib(1000) == whole[:1000]
    assert read_stdlib() is whole
    source = (json.__path__[0], "decoder.py")
    with open(os.path.join(*source), "rb") as file:  # noqa: PTH118, PTH123
        assert file.read() in whole


def test_windows_lie_side_by_side_with_the_byte_that_follows() -> None:
    text = Text(b"abcdefghij", context=3)
    assert len(text) == 3
    windows = [bytes(row) for row in text.windows(torch.tensor([0, 2, 1])).tolist()]
    assert windows == [b"abcd", b"ghij", b"defg"]


def test_the_last_windows_are_for_tests() -> None:
    body = bytes(range(81))
    train, test = Text(body, context=2), Text(body, context=2, is_test=True)
    assert (len(train), len(test)) == (38, 2)
    assert test.windows(torch.tensor([0, 1])).tolist() == [[76, 77, 78], [78, 79, 80]]


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(InputError, match="a text of 5 bytes has no window of 5; lower the context"):
        Text(b"abcde", context=5)
