"""Samples of tokens: windows of a stream of documents, several documents or whole records in a row, or one per row."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipedejavu.data.token_cache import TokenTable
from pipedejavu.facts import InputError
from pipedejavu.zoo.dataset import Indices, check_indices
from pipedejavu.zoo.loss import IGNORED
from pipedejavu.zoo.sequence import Sequences

ROUND = 64
"""Rows of whole documents are padded to a multiple of this, up to the context."""


class PackedWindows:
    """Adjacent windows of all documents one after another, each with the token that follows it."""

    def __init__(self, table: TokenTable, context: int, name: str):
        self.tokens, self.context = table.tokens, context
        self._size = (len(table.tokens) - 1) // context
        if self._size < 1:
            raise InputError(
                f"{name} has {len(table.tokens)} tokens, and a sample takes {context + 1}: {context} and the one after"
                " them; give more text, or a smaller --context"
            )

    def __len__(self) -> int:
        return self._size

    def windows(self, indices: Tensor) -> Tensor:
        """Returns token ids [samples, context + 1]."""
        return torch.from_numpy(self.tokens[self.places(indices)].astype(np.int64))

    def places(self, indices: Tensor) -> NDArray[np.int64]:
        """Returns the places of the windows' tokens in the stream [samples, context + 1]."""
        places: NDArray[np.int64] = indices.numpy()[:, None] * self.context + np.arange(self.context + 1)
        return places


class PackedDocuments:
    """Windows of several documents, with the position of each token in its document.

    A model that attends within documents computes for each of them what it computes for that document alone. The last
    token of a document predicts nothing: what follows it belongs to another one.
    """

    def __init__(self, sequences: Sequences, windows: PackedWindows, starts: NDArray[np.int64]):
        self._sequences, self._windows, self._starts = sequences, windows, starts

    def __len__(self) -> int:
        return len(self._sequences)

    def batch(self, indices: Indices) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Returns (token ids, positions) and targets [samples, context]."""
        inputs, targets = self._sequences.batch(indices)
        assert isinstance(inputs, Tensor)
        places = self._windows.places(check_indices(indices, len(self)))
        begins = self._starts[np.searchsorted(self._starts, places, side="right") - 1]
        positions = torch.from_numpy(places - np.maximum(begins, places[:, :1]))
        if self._sequences.form.objective == "next":
            targets = targets.masked_fill(positions[:, 1:] == 0, IGNORED)
        return (inputs, positions[:, :-1].contiguous()), targets


class PaddedDocuments:
    """One document per row, padded on the right; targets that are not part of an answer do not count.

    A causal model cannot see what follows a token, so padding changes nothing before it. Conversations are cut at the
    context; texts, all tokens of which count, continue in further rows.
    """

    def __init__(self, table: TokenTable, context: int, end: int, name: str):
        self._tokens, self._answers, self._end = table.tokens, table.answers, end
        starts, stops = table.starts[:-1], table.starts[1:]
        num_documents = len(starts)
        if table.answers is None:
            starts, stops = _split(starts, stops, context)
        lengths = np.minimum(stops - starts, context + 1)
        counts = self._num_counted(len(table.tokens))
        has_target = (lengths > 1) & (counts(starts + lengths) > counts(np.minimum(starts + 1, stops)))
        self._starts, self.lengths = starts[has_target], lengths[has_target] - 1
        """Input tokens of each document; the last of its tokens predicts nothing."""
        self.num_cut, self.num_dropped = int((stops - starts > context + 1).sum()), int((~has_target).sum())
        """Records that are longer than the context, and those of which no answer is left."""
        if not len(self._starts):
            raise InputError(
                f"{name} has {num_documents} records, and none has an answer within {context} tokens; give a larger"
                " --context"
            )
        self.context = _rounded(int(self.lengths.max()), context)

    def _num_counted(self, size: int) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
        """Returns a function from places to the number of tokens before them that count."""
        if self._answers is None:
            return lambda places: places
        counts = np.concatenate([[0], np.cumsum(self._answers, dtype=np.int64)])
        assert len(counts) == size + 1
        return lambda places: counts[places]

    def __len__(self) -> int:
        return len(self._starts)

    def blank(self, num_rows: int, context: int) -> tuple[Tensor, Tensor]:
        """Returns token ids and targets of rows that hold padding alone."""
        inputs = torch.full((num_rows, context), self._end, dtype=torch.int64, device="cpu")
        return inputs, torch.full_like(inputs, IGNORED)

    def write(self, number: int, inputs: Tensor, targets: Tensor) -> int:
        """Writes a document to the beginning of a row of token ids and targets; returns its number of tokens."""
        first, length = int(self._starts[number]), int(self.lengths[number])
        ids = torch.from_numpy(self._tokens[first : first + length + 1].astype(np.int64))
        inputs[:length], targets[:length] = ids[:-1], ids[1:]
        if self._answers is not None:
            counts = torch.from_numpy(np.array(self._answers[first + 1 : first + length + 1]))
            targets[:length].masked_fill_(~counts, IGNORED)
        return length

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Returns token ids and targets [samples, context]; targets outside of answers are IGNORED."""
        numbers = check_indices(indices, len(self)).tolist()
        inputs, targets = self.blank(len(numbers), self.context)
        for row, number in enumerate(numbers):
            self.write(number, inputs[row], targets[row])
        return inputs, targets


class PackedRecords:
    """Several whole records in a row, with the position of each token in its record; what is left of a row is padding.

    A record is in one row alone, so a model that attends within records computes its loss as if it were alone. The
    padding is a record of its own, whose targets do not count. Which records share a row depends only on their lengths.
    """

    def __init__(self, records: PaddedDocuments, context: int):
        self._records = records
        self._numbers, self._begins = pack(records.lengths, context)
        sizes = np.add.reduceat(records.lengths[self._numbers], self._begins[:-1])
        self.context = _rounded(int(sizes.max()), context)

    def __len__(self) -> int:
        return len(self._begins) - 1

    def batch(self, indices: Indices) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Returns (token ids, positions) and targets [samples, context]; targets outside of answers are IGNORED."""
        rows = check_indices(indices, len(self)).tolist()
        inputs, targets = self._records.blank(len(rows), self.context)
        positions = torch.empty_like(inputs)
        for row, number in enumerate(rows):
            place = 0
            for record in self._numbers[self._begins[number] : self._begins[number + 1]].tolist():
                length = self._records.write(record, inputs[row, place:], targets[row, place:])
                torch.arange(length, out=positions[row, place : place + length])
                place += length
            torch.arange(self.context - place, out=positions[row, place:])
        return (inputs, positions), targets


def pack(lengths: NDArray[np.int64], context: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Packs records into rows of up to `context` tokens: the longest first, each into the fullest row that has room.

    Returns the records' numbers row by row, in their own order within a row, and where each row begins.
    """
    row_of = np.empty(len(lengths), np.int64)
    rows_by_room: dict[int, list[int]] = {}
    rooms, num_rows = 0, 0  # bit n of `rooms` is set if a row has room for n more tokens
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                rooms ^= 1 << room
        else:
            room, row, num_rows = context, num_rows, num_rows + 1
        row_of[number] = row
        if room > length:
            rows_by_room.setdefault(room - length, []).append(row)
            rooms |= 1 << (room - length)
    begins = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=num_rows))])
    return np.argsort(row_of, kind="stable"), begins


def _rounded(length: int, context: int) -> int:
    return min(context, -(-length // ROUND) * ROUND)


def _split(
    starts: NDArray[np.int64], stops: NDArray[np.int64], context: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns documents in pieces of up to `context` + 1 tokens; the last token of a piece begins the next one."""
    counts = np.maximum(1, -(-(stops - starts - 1) // context))
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.repeat(starts, counts) + number * context
    return begins, np.minimum(begins + context + 1, np.repeat(stops, counts))
