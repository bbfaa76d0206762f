"""An encoder–decoder transformer as one chain.

The pair (memory, hidden) passes through the chain: encoder blocks change the first and pass on the second, decoder
blocks the reverse. The first unit embeds both sequences, so that no token ids are passed on, and the last decoder block
returns only `hidden`, so that every tensor between units has a gradient.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from pipedejavu.zoo.chain import Chain, Flow
from pipedejavu.zoo.form import Objective
from pipedejavu.zoo.transformer import (
    Attention,
    Embedding,
    FeedForward,
    TokenHead,
    TransformerBlock,
    TransformerSize,
    transformer_std,
)


class Seq2seqSize(TransformerSize):
    """Size of an encoder–decoder; the last token of the vocabulary starts a sequence.

    `layers` is the number of encoder blocks, and also of decoder blocks.
    """

    objective: ClassVar[Objective] = "reversed"
    separates: ClassVar[bool] = False

    vocabulary: int = 257


SIZES = {
    "seq2seq-tiny": Seq2seqSize(layers=2, width=128, context=64),
    "seq2seq-base": Seq2seqSize(layers=6, width=512, context=512),
}

Pair = tuple[Tensor, Tensor]


class PairEmbedding(Embedding):
    """Embeds source and target with the same vectors."""

    def forward(self, tokens: Pair) -> Pair:  # type: ignore[override]
        """Takes source and target tokens; the target begins with the start token."""
        source, target = tokens
        return self.embed(source), self.embed(target)


class EncoderBlock(TransformerBlock):
    """A block on the source; the last one ends with a norm."""

    def __init__(self, size: Seq2seqSize, is_last: bool):
        super().__init__(size, is_causal=False)
        self.norm3 = nn.LayerNorm(size.width) if is_last else nn.Identity()

    def forward(self, pair: Pair) -> Pair:  # type: ignore[override]
        """Updates the memory and passes the hidden state on."""
        memory, hidden = pair
        return self.norm3(self.run(memory)), hidden


class DecoderBlock(nn.Module):
    """A block on the target, with cross-attention to the memory."""

    def __init__(self, size: Seq2seqSize, is_last: bool):
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width)
        self.attention = Attention(size, is_causal=True)
        self.norm2 = nn.LayerNorm(size.width)
        self.recall = Attention(size)
        self.norm3 = nn.LayerNorm(size.width)
        self.feed_forward = FeedForward(size.width)
        self.dropout = nn.Dropout(size.dropout)
        self.is_last = is_last

    def forward(self, pair: Pair) -> Flow:
        """Updates the hidden state; the last block drops the memory."""
        memory, hidden = pair
        hidden = hidden + self.dropout(self.attention(self.norm1(hidden)))
        hidden = hidden + self.dropout(self.recall(self.norm2(hidden), memory))
        hidden = hidden + self.dropout(self.feed_forward(self.norm3(hidden)))
        return hidden if self.is_last else (memory, hidden)


class Seq2seq(Chain):
    """An encoder–decoder; the embedding, each block and the head are units."""

    def __init__(self, size: Seq2seqSize, *, seed: int = 0, device: torch.device | str | None = None):
        last = size.layers - 1
        with torch.device("meta"):
            embedding = PairEmbedding(size)
            units = [
                ("embedding", embedding),
                *((f"encoder{n}", EncoderBlock(size, is_last=n == last)) for n in range(size.layers)),
                *((f"decoder{n}", DecoderBlock(size, is_last=n == last)) for n in range(size.layers)),
                ("head", TokenHead(size, embedding)),
            ]
        super().__init__(units, std=transformer_std(3 * size.layers), seed=seed, device=device)
