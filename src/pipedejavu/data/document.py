"""Documents and conversations as tokens, with the tokens that are answers."""

import codecs
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from pipedejavu.data.data_files import DataFiles
from pipedejavu.data.record_reader import PlacedRecord, read_records
from pipedejavu.data.text_tokenizer import TextTokenizer
from pipedejavu.facts import InputError, nearest, open_file
from pipedejavu.facts.error import brief

PIECE_BYTES = 1 << 24
"""Longer text files are tokenised in pieces of about this size, which end with a line."""


class Document(NamedTuple):
    """The tokens of a text, up to and including its end token."""

    ids: Sequence[int]
    answers: Sequence[bool] | None = None
    """Which tokens are part of an answer and so count in the loss; None if all do."""
    is_ended: bool = True
    """Whether the text ends here; a long one comes in several pieces."""


def read_documents(files: DataFiles, columns: Mapping[str, str], tokenizer: TextTokenizer) -> Iterator[Document]:
    """Yields the documents of text files or records, in their order; empty texts are left out."""
    if files.kind == "text":
        for path in files.paths:
            yield from _read_text(path, tokenizer)
        return
    records = read_records(files)
    first = next(records, None)
    if first is None:
        return
    fields = find_fields(first, columns)
    for record in chain([first], records):
        document = _to_document(record, fields, columns, tokenizer)
        if document is not None:
            yield document


def find_fields(record: PlacedRecord, columns: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the fields that records have: messages, prompt and completion, or text."""
    for fields in (("messages",), ("prompt", "completion"), ("text",)):
        if all(columns[field] in record.fields for field in fields):
            return fields
    for field, column in columns.items():
        if column != field and column not in record.fields:
            raise InputError(
                f"{record.place} has no '{column}', which --columns names as {field}{nearest(column, record.fields)}"
            )
    found = ", ".join(f"'{name}'" for name in record.fields) or "no fields"
    raise InputError(
        f"{record.place} has {found}, and training needs 'text', 'prompt' and 'completion', or 'messages'; name the"
        " columns that hold them with --columns text=COLUMN"
    )


def _read_text(path: Path, tokenizer: TextTokenizer) -> Iterator[Document]:
    """Yields a file as one document, in several pieces if it is long; only the last has the end token."""
    decoder, has_text = codecs.getincrementaldecoder("utf-8")(), False
    try:
        with open_file(path) as raw, open(raw.fileno(), "rb", closefd=False) as file:
            while body := file.read(PIECE_BYTES):
                text = decoder.decode(body + file.readline(PIECE_BYTES))
                if text:
                    has_text = True
                    yield Document(tokenizer.ids(text), is_ended=False)
            decoder.decode(b"", final=True)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error.reason}; convert it, or give a folder of texts") from None
    if has_text:
        yield Document([tokenizer.end])


def _to_document(
    record: PlacedRecord, fields: Sequence[str], columns: Mapping[str, str], tokenizer: TextTokenizer
) -> Document | None:
    values = [_value(record, columns[field]) for field in fields]
    if fields == ("messages",):
        return _to_chat(record, values[0], tokenizer)
    for field, value in zip(fields, values, strict=True):
        if not isinstance(value, str):
            raise InputError(f"{record.place} has {brief(value)} as '{columns[field]}'; give a text")
    if fields == ("text",):
        return Document([*tokenizer.ids(values[0]), tokenizer.end]) if values[0] else None
    prompt, completion = values
    return _masked(prompt + completion, [(len(prompt), len(prompt) + len(completion))], tokenizer, is_ended=False)


def _to_chat(record: PlacedRecord, messages: Any, tokenizer: TextTokenizer) -> Document:
    if tokenizer.template is None:
        raise InputError(
            f"{record.place} is a chat, and the tokenizer {tokenizer.name} has no chat template; give one that has with"
            " --tokenizer, or write prompt and completion instead of messages"
        )
    is_chat = isinstance(messages, list) and messages
    if not is_chat or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages):
        raise InputError(
            f"{record.place} has {brief(messages)} as messages; give a list of objects with role and content"
        )
    if not any(message["role"] == "assistant" for message in messages):
        raise InputError(f"{record.place} has no message of the role assistant, so nothing to learn; leave it out")
    try:
        text, spans = tokenizer.template.render(messages)
    except InputError as error:
        raise InputError(f"{record.place}: {error}") from None
    return _masked(text, spans, tokenizer, is_ended=True)


def _masked(text: str, spans: Sequence[tuple[int, int]], tokenizer: TextTokenizer, *, is_ended: bool) -> Document:
    """Returns a text whose tokens count if they have a character of a span, and the end token if it is to be added."""
    ids, offsets = tokenizer.encode(text)
    answers = [any(end > first and start < last for first, last in spans) for start, end in offsets]
    if is_ended:  # the template ends each answer in its own way
        return Document([*ids], answers)
    return Document([*ids, tokenizer.end], [*answers, True])


def _value(record: PlacedRecord, column: str) -> Any:
    if column not in record.fields:
        raise InputError(f"{record.place} has no '{column}', which the records before it have; add it")
    return record.fields[column]
