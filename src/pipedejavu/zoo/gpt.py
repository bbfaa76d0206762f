"""GPT: a causal transformer, byte-level by default, in the sizes of SHAPES and in any other."""

import torch

from pipedejavu.zoo.chain import Chain
from pipedejavu.zoo.gpt_shape import SHAPES
from pipedejavu.zoo.transformer import Embedding, TokenHead, TransformerBlock, TransformerSize, transformer_std

_TEN = TransformerSize(layers=10, width=512, context=1000, vocabulary=10_000, heads=1)
"""Ten layers with one head; the width of 512 is that of the first transformers."""

_BYTES = 256
_VOCABULARIES = {"gpt-175b": 50257}
"""Vocabularies other than the 256 bytes."""

SIZES = {
    **{
        name: TransformerSize(
            layers=shape.layers,
            width=shape.width,
            context=shape.context,
            vocabulary=_VOCABULARIES.get(name, _BYTES),
        )
        for name, shape in SHAPES.items()
    },
    "gpt-10-layers": _TEN.replace(dropout=0.2),
    "gpt-10-layers-no-dropout": _TEN,
}


class Gpt(Chain):
    """A GPT; the embedding, each block and the head are units, named as in the profile of its shape."""

    def __init__(self, size: TransformerSize, *, seed: int = 0, device: torch.device | str | None = None):
        with torch.device("meta"):
            embedding = Embedding(size)
            units = [
                ("embedding", embedding),
                *((f"block{n}", TransformerBlock(size, is_causal=True)) for n in range(size.layers)),
                ("head", TokenHead(size, embedding)),
            ]
        super().__init__(units, std=transformer_std(2 * size.layers), seed=seed, device=device)
