"""Dimensions of GPT models, by name or as a text such as 'gpt:24x2048x16,seq=2048,vocab=50257'."""

import re
from typing import NamedTuple

from pipedejavu.facts import InputError, nearest
from pipedejavu.program.limit import MOST_UNITS


class Shape(NamedTuple):
    """Size of a GPT."""

    layers: int
    width: int
    heads: int
    context: int = 2048
    """Tokens per sequence."""
    vocabulary: int = 51200
    """Tokens of the vocabulary; by default GPT-2's 50,257, padded for tensor-parallel groups."""


SHAPES = {
    "gpt-tiny": Shape(4, 128, 2, 256, 256),
    "gpt-small": Shape(12, 768, 12, 1024),
    "gpt-medium": Shape(24, 1024, 16, 1024),
    "gpt-large": Shape(36, 1280, 20, 1024),
    "gpt-1.3b": Shape(24, 2048, 16),
    "gpt-6.7b": Shape(32, 4096, 32),
    "gpt-175b": Shape(96, 12288, 96),
}

PREFIX = "gpt:"
_FORM = f"{PREFIX}LAYERSxWIDTHxHEADS[,seq=TOKENS][,vocab=TOKENS]"
_OPTIONS = {"seq": "context", "vocab": "vocabulary"}
_MOST = {"layers": MOST_UNITS - 2, "width": 1 << 20, "heads": 1 << 20, "context": 1 << 24, "vocabulary": 1 << 24}


def read_shape(text: str) -> Shape:
    """Returns the shape of a name or of a text; raises InputError if there is no such name, or a number is wrong."""
    if not text.startswith(PREFIX):
        if text in SHAPES:
            return SHAPES[text]
        raise InputError(f"there is no model shape '{text}'{nearest(text, SHAPES)} (others are written {_FORM})")
    sizes, *options = text.removeprefix(PREFIX).split(",")
    if not re.fullmatch(r"\d+x\d+x\d+", sizes, re.ASCII):
        raise InputError(f"model shape '{text}' is not {_FORM}; write it as '{PREFIX}24x2048x16,seq=2048,vocab=50257'")
    numbers = dict(zip(Shape._fields, map(int, sizes.split("x")), strict=False))
    for option in options:
        name, _, number = option.partition("=")
        field = _OPTIONS.get(name)
        if field is None:
            raise InputError(f"model shape '{text}' has no option '{name}'{nearest(name, _OPTIONS)}; write {_FORM}")
        if field in numbers or not re.fullmatch(r"\d+", number, re.ASCII):
            fault = "twice" if field in numbers else f"as '{number}', which is no whole number"
            raise InputError(f"model shape '{text}' gives {name} {fault}; write it once, such as {name}=2048")
        numbers[field] = int(number)
    return _checked(Shape(**numbers), text)


def shape_text(shape: Shape) -> str:
    """Returns the text that `read_shape` reads a shape from."""
    return f"{PREFIX}{shape.layers}x{shape.width}x{shape.heads},seq={shape.context},vocab={shape.vocabulary}"


def tokens_of(name: str) -> int | None:
    """Returns the tokens per sample of a shape; None for another model."""
    return read_shape(name).context if name in SHAPES or name.startswith(PREFIX) else None


def _checked(shape: Shape, text: str) -> Shape:
    for name, number in shape._asdict().items():
        if not 1 <= number <= _MOST[name]:
            raise InputError(f"model shape '{text}' has {number:,} as its {name}; give 1 to {_MOST[name]:,}")
    if shape.width % shape.heads:
        raise InputError(
            f"model shape '{text}' divides a width of {shape.width:,} over {shape.heads:,} heads; give a number of"
            " heads that divides the width"
        )
    return shape
