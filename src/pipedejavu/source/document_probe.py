"""Whether a model of transformers computes several documents in a row as it computes each of them alone."""

import inspect

import torch
from torch import Tensor, nn

from pipedejavu.source.probed_model import undisturbed

_LENGTHS = (3, 4)
"""Tokens of the two documents that are compared."""


def separates_documents(model: nn.Module) -> bool:
    """Whether a causal model takes positions, and a document's logits depend neither on the one before nor its place.

    Two documents run in one row, and the second alone. A model without memory is taken to do what its arguments say.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    device = next(model.parameters()).device
    if device.type == "meta":
        return True
    first, second = _LENGTHS
    positions = torch.tensor([[*range(first), *range(second)]], device=device)
    tokens = torch.arange(first + second, device=device)[None] + 1
    with undisturbed(model), torch.no_grad():
        try:
            packed = _logits(model, tokens, positions)[:, first:]
            alone = _logits(model, tokens[:, first:], positions[:, first:])
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            return False  # it takes positions for something else
    # Logits differ by rounding if the model separates documents, and by about their size if it does not.
    return bool(torch.allclose(packed, alone, rtol=0.0, atol=_tolerance(alone)))


def _tolerance(logits: Tensor) -> float:
    return float(torch.finfo(logits.dtype).eps ** 0.5 * logits.abs().max())


def _logits(model: nn.Module, tokens: Tensor, positions: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    return logits
