"""Samples of tokens: windows of a stream of documents, or one conversation each."""

import numpy as np
import torch
from torch import Tensor

from pipedejavu.data.token_cache import TokenTable
from pipedejavu.facts import InputError
from pipedejavu.zoo.dataset import Indices, check_indices
from pipedejavu.zoo.loss import IGNORED

ROUND = 64
"""Rows of conversations are padded to a multiple of this, up to the context."""


class PackedWindows:
    """Adjacent windows of all documents one after another, each with the token that follows it."""

    def __init__(self, table: TokenTable, context: int, name: str):
        self._tokens, self._context = table.tokens, context
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
        starts = indices.numpy()[:, None] * self._context
        return torch.from_numpy(self._tokens[starts + np.arange(self._context + 1)].astype(np.int64))


class PaddedChats:
    """One conversation per sample, padded on the right; targets that are not part of an answer do not count.

    A causal model cannot see what follows a token, so padding changes nothing before it.
    """

    def __init__(self, table: TokenTable, context: int, end: int, name: str):
        assert table.answers is not None
        self._tokens, self._answers, self._end = table.tokens, table.answers, end
        starts, stops = table.starts[:-1], table.starts[1:]
        lengths = np.minimum(stops - starts, context + 1)
        counts = np.concatenate([[0], np.cumsum(table.answers, dtype=np.int64)])
        has_answer = (lengths > 1) & (counts[starts + lengths] > counts[np.minimum(starts + 1, stops)])
        self._starts, self._lengths = starts[has_answer], lengths[has_answer]
        self.num_cut, self.num_dropped = int((stops - starts > context + 1).sum()), int((~has_answer).sum())
        """Records that are longer than the context, and those of which no answer is left."""
        if not len(self._starts):
            raise InputError(
                f"{name} has {len(starts)} records, and none has an answer within {context} tokens; give a larger"
                " --context"
            )
        longest = int(self._lengths.max()) - 1
        self.context = min(context, -(-longest // ROUND) * ROUND)

    def __len__(self) -> int:
        return len(self._starts)

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Returns token ids and targets [samples, context]; targets outside of answers are IGNORED."""
        numbers = check_indices(indices, len(self)).tolist()
        inputs = torch.full((len(numbers), self.context), self._end, dtype=torch.int64, device="cpu")
        targets = torch.full_like(inputs, IGNORED)
        for row, number in enumerate(numbers):
            first, length = int(self._starts[number]), int(self._lengths[number])
            ids = torch.from_numpy(self._tokens[first : first + length].astype(np.int64))
            counts = torch.from_numpy(np.array(self._answers[first + 1 : first + length]))
            inputs[row, : length - 1] = ids[:-1]
            targets[row, : length - 1] = ids[1:].masked_fill(~counts, IGNORED)
        return inputs, targets
