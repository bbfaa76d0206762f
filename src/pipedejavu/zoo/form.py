"""The form of the samples that a model reads; no torch, no data."""

from typing import Annotated, Literal

from pydantic import Field

from pipedejavu.facts import Record

Count = Annotated[int, Field(ge=1)]

Objective = Literal["next", "masked", "reversed"]
"""What is asked of a sequence: each next token, the tokens that were masked, or the sequence backwards."""


class ImageForm(Record):
    """Arrays of one shape, each of one class."""

    shape: tuple[Count, ...] = (784,)
    """Of one sample: channels, height and width, or a number of features."""
    classes: int = Field(default=10, ge=2)


class TokenForm(Record):
    """Sequences of tokens."""

    context: int = Field(default=256, ge=1)
    vocabulary: int = Field(default=256, ge=2)
    objective: Objective = "next"

    @property
    def num_plain(self) -> int:
        """How many of the tokens stand for data; the last one of the vocabulary may be a mask or a beginning."""
        return self.vocabulary - (self.objective != "next")

    @property
    def special(self) -> int:
        """The token that masks another or begins a sequence."""
        return self.vocabulary - 1


Form = ImageForm | TokenForm
