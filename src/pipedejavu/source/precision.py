"""Checks of precision: dtypes of parameters, and autocast around a run."""

import torch
from torch import nn

from pipedejavu.facts import InputError


def check_parameters(model: nn.Module, *, takes_bfloat16: bool = False) -> None:
    """Raises InputError for trained parameters that cannot be updated correctly: sparse, complex or low precision.

    With `takes_bfloat16`, masters of bfloat16 parameters are kept.
    """
    dtypes = (torch.float32, torch.float64) + (torch.bfloat16,) * takes_bfloat16
    for name, part in model.named_modules():
        if getattr(part, "sparse", False) and any(p.requires_grad for p in part.parameters(recurse=False)):
            raise InputError(
                f"layer '{name}' ({type(part).__name__}) has sparse=True, and sparse gradients cannot be added up here;"
                " make it with sparse=False"
            )
    for name, parameter in model.named_parameters():
        kind = str(parameter.dtype).removeprefix("torch.")
        if parameter.requires_grad and parameter.is_complex():
            raise InputError(
                f"parameter '{name}' is {kind}, and optimizers here take real numbers; keep it as real numbers and use"
                " torch.view_as_complex in forward"
            )
        if parameter.requires_grad and parameter.dtype not in dtypes:
            raise InputError(
                f"parameter '{name}' is {kind}, in which most updates are too small to change it, and no float32 copy"
                " is kept here; call model.float() first, or train with HybridAdamW, which keeps float32 masters of"
                " bfloat16"
            )


def check_autocast(call: str) -> None:
    """Raises InputError if autocast is enabled around a call; it does not reach the threads of a run."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            raise InputError(
                f"autocast is on for {device} around {call}, where it has no effect: workers are threads of their own;"
                " leave it out, or use it inside the model's forward"
            )
