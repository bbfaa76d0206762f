"""The modules of all transformers in the zoo, and their sizes.

Blocks are pre-norm: the value between blocks is the plain sum of the residuals.
"""

import math
from functools import partial
from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from pipedejavu.facts import InputError, Record
from pipedejavu.zoo.chain import Std
from pipedejavu.zoo.form import Objective, TokenForm

_STD = 0.02


class TransformerSize(Record):
    """Size of a transformer."""

    objective: ClassVar[Objective] = "next"
    separates: ClassVar[bool] = True
    """Whether a row may hold several documents: the model takes positions, and attends within each document."""

    layers: int = Field(ge=1)
    width: int = Field(ge=1)
    context: int = Field(default=256, ge=1)
    """Most tokens per sequence."""
    vocabulary: int = Field(default=256, ge=2)
    heads: int | None = Field(default=None, ge=1)
    """By default, heads of about 64 values, or 128 from width 2048 on."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    is_tied: bool = False
    """Whether the token embedding and the last linear layer share one Parameter."""

    @property
    def num_heads(self) -> int:
        """The number of heads, with the default resolved."""
        if self.heads is not None:
            return self.heads
        wanted = max(1, self.width // (128 if self.width >= 2048 else 64))
        return next(n for n in range(wanted, 0, -1) if self.width % n == 0)

    def form(self) -> TokenForm:
        """Returns the form of its samples."""
        return TokenForm(context=self.context, vocabulary=self.vocabulary, objective=self.objective)

    def disagreements(self) -> list[str]:
        """Returns a fault if the heads do not divide the width."""
        if self.heads and self.width % self.heads:
            return [f"a width of {self.width} cannot be divided over {self.heads} heads; change one of them"]
        return []

    @model_validator(mode="after")
    def _agree(self) -> Self:
        return self.agreed()


def transformer_std(num_residuals: int) -> Std:
    """Returns the rule for initial values: a deviation of 0.02, less for layers that add to the residual."""
    return partial(_std, num_residuals)


def _std(num_residuals: int, name: str, shape: torch.Size) -> float:  # noqa: ARG001 (a Std takes both)
    return _STD / math.sqrt(num_residuals) if name.endswith(("output.weight", "weight_out")) else _STD


Packed = tuple[Tensor, Tensor]
"""Rows of several documents: token ids or vectors, and the position in its document or the document of each token."""


class Embedding(nn.Module):
    """Token and position embeddings."""

    def __init__(self, size: TransformerSize):
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, flow: Tensor | Packed) -> Tensor | Packed:
        """Takes token ids [samples, tokens]; returns vectors [samples, tokens, width].

        With positions, which begin at 0 in each document, it returns the number of each token's document too.
        """
        if not isinstance(flow, tuple):
            return self.embed(flow)
        tokens, positions = flow
        return self.embed(tokens, positions), (positions == 0).cumsum(1)

    def embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Returns the sum of both embeddings; tokens without positions are counted from the left."""
        length, context = tokens.shape[1], self.position.num_embeddings
        if length > context:
            raise InputError(f"a sequence has {length} tokens, but the model's context is {context}; raise context")
        where = self.position.weight[:length] if positions is None else self.position(positions)
        hidden: Tensor = self.dropout(self.token(tokens) + where)
        return hidden


class Attention(nn.Module):
    """Self-attention, or cross-attention if a memory is passed."""

    def __init__(self, size: TransformerSize, is_causal: bool = False):
        super().__init__()
        self.query = nn.Linear(size.width, size.width)
        self.key_value = nn.Linear(size.width, 2 * size.width)
        self.output = nn.Linear(size.width, size.width)
        self.num_heads = size.num_heads
        self.dropout = size.dropout
        self.is_causal = is_causal

    def forward(self, hidden: Tensor, memory: Tensor | None = None, document: Tensor | None = None) -> Tensor:
        """Takes and returns [samples, tokens, width]; with documents, a token attends to its own one."""
        key, value = self.key_value(hidden if memory is None else memory).chunk(2, dim=-1)
        mixed = functional.scaled_dot_product_attention(
            self._heads(self.query(hidden)),
            self._heads(key),
            self._heads(value),
            dropout_p=self.dropout if self.training else 0.0,
            attn_mask=None if document is None else self._mask(document),
            is_causal=self.is_causal and document is None,
        )
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out

    def _mask(self, document: Tensor) -> Tensor:
        """Returns which tokens each token attends to [samples, 1, tokens, tokens]."""
        mask = document[:, None, :, None] == document[:, None, None, :]
        return mask.tril() if self.is_causal else mask

    def _heads(self, hidden: Tensor) -> Tensor:
        return hidden.view(*hidden.shape[:-1], self.num_heads, -1).transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear layers with GELU between them, four times as wide inside."""

    def __init__(self, width: int):
        super().__init__()
        self.input = nn.Linear(width, 4 * width)
        self.output = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Takes and returns [samples, tokens, width]."""
        out: Tensor = self.output(functional.gelu(self.input(hidden)))
        return out


class TransformerBlock(nn.Module):
    """Attention and a feed-forward layer, each with a residual connection."""

    def __init__(self, size: TransformerSize, is_causal: bool):
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width)
        self.attention = Attention(size, is_causal)
        self.norm2 = nn.LayerNorm(size.width)
        self.feed_forward = FeedForward(size.width)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, flow: Tensor | Packed) -> Tensor | Packed:
        """Takes and returns [samples, tokens, width], and passes on the tokens' documents if they are given."""
        if not isinstance(flow, tuple):
            return self.run(flow)
        hidden, document = flow
        return self.run(hidden, document), document

    def run(self, hidden: Tensor, document: Tensor | None = None) -> Tensor:
        """Adds both layers' outputs to the residual."""
        hidden = hidden + self.dropout(self.attention(self.norm1(hidden), document=document))
        out: Tensor = hidden + self.dropout(self.feed_forward(self.norm2(hidden)))
        return out


class TokenHead(nn.Module):
    """A final norm, and a linear layer to the vocabulary."""

    def __init__(self, size: TransformerSize, embedding: Embedding):
        super().__init__()
        self.norm = nn.LayerNorm(size.width)
        self.logit = nn.Linear(size.width, size.vocabulary, bias=False)
        if size.is_tied:
            self.logit.weight = embedding.token.weight

    def forward(self, flow: Tensor | Packed) -> Tensor:
        """Returns logits [samples, tokens, vocabulary]."""
        hidden = flow[0] if isinstance(flow, tuple) else flow
        logits: Tensor = self.logit(self.norm(hidden))
        return logits
