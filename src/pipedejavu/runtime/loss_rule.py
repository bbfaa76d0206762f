"""Axes of operations whose vocabulary or tokens are divided: the rows of an embedding, and a cross-entropy.

Such operations are no plain sums of parts: `loss_part` computes them.
"""

from collections.abc import Callable, Mapping

import torch
from torch import fx

from pipedejavu.runtime.axis_rule import Axes, argument, shape_of

LOSS = "cross_entropy_loss"


def _loss_axes(node: fx.Node) -> Axes | None:
    logits, target = argument(node, "self"), argument(node, "target")
    sizes = shape_of(logits)
    if len(sizes) < 2 or target.meta["val"].dtype != torch.int64 or len(shape_of(target)) != len(sizes) - 1:
        return None
    tokens = ("n", *(f"d{d}" for d in range(2, len(sizes))))
    out = tokens if argument(node, "reduction", 1) == 0 else ()
    return Axes(out, ((logits, (tokens[0], "class", *tokens[1:])), (target, tokens)))


def _class_axes(node: fx.Node) -> Axes | None:
    return None if argument(node, "weight") is not None else _loss_axes(node)


def _row_axes(node: fx.Node) -> Axes | None:
    weight, rows = argument(node, "weight"), argument(node, "indices")
    if argument(node, "scale_grad_by_freq", False) or argument(node, "sparse", False):
        return None
    lead = tuple(f"b{d}" for d in range(len(shape_of(rows))))
    return Axes((*lead, "out"), ((weight, ("row", "out")), (rows, lead)))


def _attention_axes(node: fx.Node) -> Axes | None:
    tensors = [argument(node, name) for name in ("query", "key", "value")]
    lengths = {shape_of(tensor)[-2] for tensor in tensors}
    if any(len(shape_of(tensor)) != 4 for tensor in tensors) or len(lengths) > 1:
        return None
    names = ("b", "h", "token", None)
    return Axes(names, tuple((tensor, names) for tensor in tensors))


Rules = Mapping[str, Callable[[fx.Node], Axes | None]]

VOCABULARY_RULES: Rules = {"embedding": _row_axes, LOSS: _class_axes}
"""If the vocabulary is divided: rows of embeddings, and classes of losses without class weights."""

SEQUENCE_RULES: Rules = {"scaled_dot_product_attention": _attention_axes, LOSS: _loss_axes}
"""If the sequence is divided: queries, keys and values of one length, and tokens of losses."""
