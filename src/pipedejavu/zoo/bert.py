"""BERT: a bidirectional transformer that predicts masked tokens.

It differs from the published model in two ways: blocks are pre-norm, which trains without a warm-up, and there are no
segment embeddings.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipedejavu.zoo.chain import Chain
from pipedejavu.zoo.form import Objective
from pipedejavu.zoo.transformer import Embedding, Packed, TransformerBlock, TransformerSize, transformer_std


class BertSize(TransformerSize):
    """Size of a BERT; the last token of the vocabulary is the mask."""

    objective: ClassVar[Objective] = "masked"

    vocabulary: int = 257


SIZES = {
    "bert-tiny": BertSize(layers=2, width=128, context=128),
    "bert-base": BertSize(layers=12, width=768, context=512),
    "bert-large": BertSize(layers=24, width=1024, context=512),
}


class MaskedHead(nn.Module):
    """A final norm, one hidden layer, and a linear layer with a bias to the vocabulary."""

    def __init__(self, size: BertSize, embedding: Embedding):
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width)
        self.linear = nn.Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.logit = nn.Linear(size.width, size.vocabulary)
        if size.is_tied:
            self.logit.weight = embedding.token.weight

    def forward(self, flow: Tensor | Packed) -> Tensor:
        """Returns logits [samples, tokens, vocabulary]."""
        hidden = flow[0] if isinstance(flow, tuple) else flow
        hidden = self.norm2(functional.gelu(self.linear(self.norm1(hidden))))
        logits: Tensor = self.logit(hidden)
        return logits


class Bert(Chain):
    """A BERT; the embedding, each block and the head are units."""

    def __init__(self, size: BertSize, *, seed: int = 0, device: torch.device | str | None = None):
        with torch.device("meta"):
            embedding = Embedding(size)
            units = [
                ("embedding", embedding),
                *((f"block{n}", TransformerBlock(size, is_causal=False)) for n in range(size.layers)),
                ("head", MaskedHead(size, embedding)),
            ]
        super().__init__(units, std=transformer_std(2 * size.layers), seed=seed, device=device)
