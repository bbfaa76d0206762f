"""Masters: the float32 values of weights that updates work on.

The master of a split weight is its bf16 tensor together with the slot `low` of its optimizer state. Every other weight
is its own master.
"""

from collections.abc import Collection, Mapping

import torch

from pipedejavu.engine.optimizer import LOW, Tensors
from pipedejavu.optim.arithmetic import join, split


def weights_of(masters: Tensors, lowered: Collection[str], *, is_split: bool) -> tuple[Tensors, Tensors]:
    """Returns new weights to compute with, and the low halves of those that are split, by name."""
    weights, lows = {}, {}
    for name, master in masters.items():
        if name in lowered:
            weights[name], low = split(master.detach().contiguous())
            if is_split:
                lows[name] = low
        else:
            weights[name] = master.detach().clone()
            if is_split and master.dtype == torch.bfloat16:
                lows[name] = torch.zeros_like(master, dtype=torch.int16)
    return weights, lows


def masters_of(weights: Tensors, state: Mapping[str, Tensors]) -> Tensors:
    """Returns the masters of weights with this optimizer state."""
    lows = {name: slots[LOW] for name, slots in state.items() if LOW in slots}
    return {
        name: join(weight.detach(), lows[name].to(weight.device)) if name in lows else weight.detach()
        for name, weight in weights.items()
    }
