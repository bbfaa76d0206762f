import pytest

from pipedejavu.facts import InputError
from pipedejavu.zoo.gpt_shape import SHAPES, Shape, read_shape


def test_a_name_or_a_text_is_a_shape() -> None:
    assert read_shape("gpt-175b") is SHAPES["gpt-175b"]
    assert read_shape("gpt:24x2048x16") == Shape(24, 2048, 16, context=2048, vocabulary=51200)
    assert read_shape("gpt:3x96x4,vocab=1000,seq=7") == Shape(3, 96, 4, context=7, vocabulary=1000)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("gpt-medum", r"there is no model shape 'gpt-medum'; did you mean 'gpt-medium'\?"),
        ("gpt:24x2048", r"model shape 'gpt:24x2048' is not gpt:LAYERSxWIDTHxHEADS.*write it as 'gpt:24x2048x16"),
        ("gpt:24x2048x-1", r"is not gpt:LAYERSxWIDTHxHEADS"),
        ("gpt:24x2048x16,sequence=5", r"has no option 'sequence'; did you mean 'seq'\?; write gpt:LAYERS"),
        ("gpt:24x2048x16,", r"has no option ''"),
        ("gpt:24x2048x16,seq=1,seq=2", r"gives seq twice; write it once, such as seq=2048"),
        ("gpt:24x2048x16,seq=1k", r"gives seq as '1k', which is no whole number"),
        ("gpt:24x2048x15", r"divides a width of 2,048 over 15 heads; give a number of heads that divides the width"),
        ("gpt:0x2048x16", r"has 0 as its layers; give 1 to 4,094"),
        ("gpt:5000x2048x16", r"has 5,000 as its layers; give 1 to 4,094"),
        ("gpt:24x2048x16,vocab=99999999999", r"has 99,999,999,999 as its vocabulary; give 1 to 16,777,216"),
    ],
)
def test_a_wrong_shape_is_refused(text: str, fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        read_shape(text)
