"""The form of the samples that a model reads; without torch or data."""

from typing import Annotated, Literal

from pydantic import Field

from pipedejavu.facts import Record

Count = Annotated[int, Field(ge=1)]

Objective = Literal["next", "masked", "reversed"]
"""What a model predicts from a sequence: the next tokens, the masked tokens, or the sequence reversed."""


class ImageForm(Record):
    """Arrays of one shape, each with a class."""

    shape: tuple[Count, ...] = (784,)
    """Shape of a sample: channels, height and width, or a number of features."""
    classes: int = Field(default=10, ge=2)


class TokenForm(Record):
    """Sequences of tokens."""

    context: int = Field(default=256, ge=1)
    vocabulary: int = Field(default=256, ge=2)
    objective: Objective = "next"

    @property
    def num_plain(self) -> int:
        """The number of tokens that stand for data; the last of the vocabulary may be a mask or a start token."""
        return self.vocabulary - (self.objective != "next")

    @property
    def special(self) -> int:
        """The token that masks another one or starts a sequence."""
        return self.vocabulary - 1


Aggregation = Literal["mean", "symmetric", "none"]
"""How the first layer of a graph network combines neighbours: by their mean, a sum with symmetric weights, or by
weights of its own."""


class GraphForm(Record):
    """Nodes of a graph with sampled neighbours, each with a class."""

    fanouts: tuple[int, ...] = (10, 5)
    """Neighbours that are sampled per node, the first for the targets; -1 for all."""
    aggregation: Aggregation = "mean"
    aggregates_on_host: bool = True
    """Whether the data does the first aggregation, which reads no weights; else it gathers each node's features."""
    features: Count | None = None
    """Features of a node; by default those of the data."""
    classes: Count | None = None


Form = ImageForm | TokenForm | GraphForm
