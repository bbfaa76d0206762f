"""The data that a user asks for: a name or a path, and how to read it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from pipedejavu.facts import InputError, Record, nearest

FIELDS = ("text", "prompt", "completion", "messages")
"""What a column can hold."""
HUB = "hf:"
"""What the name of a data set on the Hugging Face hub begins with."""
NAMES = ("digits", "mnist", "cifar10", "stdlib", "random", "graph")
"""Data sets that are known by name; everything else is a path."""

Part = Literal["all", "train", "eval"]
Packing = Literal["documents", "stream", "rows"]


class DataChoice(Record):
    """What to train on, and how to read it."""

    name: str | None = None
    """The name of a data set, a file, or a folder; None for the model's default."""
    tokenizer: str | None = None
    """A tokenizer.json, or a folder that has one; by default that of the model."""
    context: int | None = Field(default=None, ge=1)
    """Tokens per sample; by default the model's."""
    columns: str | None = None
    """Columns by what they hold, as FIELD=COLUMN,FIELD=COLUMN."""
    packing: Packing = "documents"
    """How texts and chats become samples: several in a row, each attending to itself alone; windows of one stream, in
    which attention crosses from text to text; or one per row."""
    fanout: str | None = None
    """Neighbours that are sampled per node and layer, as 10,5; by default those of the model."""
    held_out: float = Field(default=0.0, ge=0)
    """What is kept for evaluation: a share of the samples, or their number if it is 1 or more."""
    evaluation: str | None = None
    """Other data to evaluate on: a file, a folder, or a data set with a name, whose test split is read."""
    part: Part = "all"
    """Which samples to read: all, those to train on, or those held out."""

    @property
    def path(self) -> Path | None:
        """The file or folder of the data; None for a data set with a name."""
        return path_of(self.name) if self.name is not None and is_path(self.name) else None

    @property
    def column_names(self) -> dict[str, str]:
        """The name of the column for each field; a field that is not mapped has its own name."""
        return {**{field: field for field in FIELDS}, **parse_columns(self.columns)}

    def for_evaluation(self) -> "DataChoice | None":
        """Returns the choice of the data to evaluate on; None if there is none."""
        if self.evaluation is not None:
            return self.replace(name=self.evaluation, evaluation=None, held_out=0.0, part="all")
        return self.replace(part="eval") if self.held_out else None


def is_path(name: str) -> bool:
    """Whether data is a file or folder rather than a data set with a name."""
    kind = name.partition(":")[0]
    is_named = bool(re.search(r"[/\\.]", name)) or name.startswith(HUB) or Path(name).exists()
    return kind not in NAMES and is_named


def path_of(name: str) -> Path:
    """Returns a file or folder; of a data set on the hub the folder in the cache that it is fetched into."""
    from pipedejavu.data.token_cache import cache_path

    return cache_path({"hub": name}) if name.startswith(HUB) else Path(name)


def parse_columns(text: str | None) -> Mapping[str, str]:
    """Reads FIELD=COLUMN,FIELD=COLUMN; raises InputError if it is anything else."""
    columns: dict[str, str] = {}
    for pair in text.split(",") if text else ():
        field, equals, column = (part.strip() for part in pair.partition("="))
        if not equals or not column:
            raise InputError(f"--columns is FIELD=COLUMN, separated by commas, found '{pair}'; write text=COLUMN, say")
        if field not in FIELDS:
            raise InputError(f"--columns has no field '{field}'{nearest(field, FIELDS)}")
        if field in columns:
            raise InputError(f"--columns gives '{field}' twice: '{columns[field]}' and '{column}'; leave one out")
        columns[field] = column
    return columns


def check_choice(choice: DataChoice) -> None:
    """Raises InputError if the columns cannot be read or a file that the choice names is missing."""
    parse_columns(choice.columns)
    path = choice.path
    if choice.held_out and choice.evaluation is not None:
        raise InputError("--eval holds out a part of --data, and --eval-data names other data; give one of them")
    if 1 < choice.held_out != round(choice.held_out):
        raise InputError(f"--eval is a share below 1 or a whole number of samples, not {choice.held_out:g}")
    evaluation = choice.evaluation if is_path(choice.evaluation or "") else None
    for named in (choice.name if path else None, choice.tokenizer, evaluation):
        if named is not None and not path_of(named).exists():
            raise InputError(f"cannot read {named}: there is no such file or folder")
    if path is None and (choice.columns or choice.tokenizer):
        option = "--columns" if choice.columns else "--tokenizer"
        raise InputError(f"{option} says how to read files, but --data names none; give --data a file or a folder")
