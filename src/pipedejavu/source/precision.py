"""Precision of what users give: dtypes of parameters, and autocast around a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipedejavu.facts import InputError
from pipedejavu.run.options import TrainOptions
from pipedejavu.source.chosen_data import data_choice
from pipedejavu.source.model_source import open_task


def check_parameters(model: nn.Module) -> None:
    """Raises InputError for trained parameters that cannot be updated correctly: sparse, complex or low precision."""
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
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64, torch.bfloat16):
            raise InputError(
                f"parameter '{name}' is {kind}, in which most updates are too small to change it, and only bfloat16"
                " has float32 masters here; call model.float() first, and train with precision fp16 to compute in it"
            )


def trained_dtype(model: nn.Module) -> torch.dtype:
    """Returns bfloat16 if some trained parameter is, else float64 if some is, else float32."""
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    return next((kind for kind in (torch.bfloat16, torch.float64) if kind in kinds), torch.float32)


def model_dtype(options: TrainOptions) -> torch.dtype:
    """Returns the format of the trained parameters of a run's model; opens the model if only its code says it."""
    if ".py:" not in options.model:
        return torch.float64 if options.parameter_dtype == "float64" else torch.float32
    return trained_dtype(open_task(options.model, seed=options.seed, data=data_choice(options)).model)


def take_autocast(call: str, asked: Any) -> Any:
    """Returns the precision that a call is asked for: that of a bfloat16 autocast around it if `asked` is "auto".

    Raises InputError if autocast is enabled with another precision than the call has.
    """
    for device in ("cpu", "cuda"):
        if not torch.is_autocast_enabled(device):
            continue
        dtype = torch.get_autocast_dtype(device)
        if dtype != torch.bfloat16:
            raise InputError(
                f"autocast is on for {device} around {call} with {str(dtype).removeprefix('torch.')}, which needs a"
                " scaled loss; leave it out and give the Trainer precision='fp16'"
            )
        if asked not in ("auto", "bf16"):
            raise InputError(
                f"autocast is on for {device} around {call}, and the Trainer computes {asked}; leave it out, or give"
                " precision='bf16'"
            )
        return "bf16"
    return asked


def check_autocast(call: str) -> None:
    """Raises InputError if autocast is enabled around a call that computes in the formats of the model."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            raise InputError(
                f"autocast is on for {device} around {call}, where it has no effect: workers are threads of their own;"
                " leave it out, or use it inside the model's forward"
            )


@contextmanager
def no_autocast() -> Iterator[None]:
    """Disables autocast meanwhile: the precision of a run is the plan's."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield
