"""Checks, on shapes alone, that modules run with some of their filters left out."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipedejavu.facts import InputError
from pipedejavu.runtime.filter_layout import FilterLayout
from pipedejavu.runtime.kept_filters import KeptFilters


def check_narrowed(units: Sequence[tuple[str, nn.Module]], layout: FilterLayout, value: Any, expected: Any) -> None:
    """Raises InputError if a unit fixes a size that changes when half of the filters are left out.

    `expected` are the shapes of the outputs of the last unit; nothing is computed.
    """
    counts = layout.counts((0.5,) * len(layout.groups))
    kept = KeptFilters(layout, counts, range(len(counts)))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    value = tuple(map(mode.from_tensor, value)) if isinstance(value, tuple) else mode.from_tensor(value)
    unit = ""
    try:
        with mode, torch.no_grad():
            for unit, module in units:
                tensors = {n: kept.used(f"{unit}.{n}", p) for n, p in module.named_parameters()}
                # A count of batches that is a real tensor would be raised even here.
                tensors |= {n: kept.narrow(f"{unit}.{n}", b).clone() for n, b in module.named_buffers()}
                value = torch.func.functional_call(module, tensors, (value,))
    except (RuntimeError, InputError, ValueError) as error:
        reason = str(error).split("\n")[0].rstrip(".")
        raise _refusal(unit, f" ({reason})") from error
    shapes = [tuple(tensor.shape) for tensor in (value if isinstance(value, tuple) else (value,))]
    if shapes != [tuple(shape) for shape in expected]:
        raise _refusal(unit, f": its output would be {shapes} and not {expected}")


def _refusal(unit: str, reason: str) -> InputError:
    return InputError(
        f"unit '{unit}' does not run with some filters left out{reason}; use a chain of modules (nn.Sequential) whose"
        " forwards take sizes from their inputs, such as x.flatten(1) in place of x.view(-1, 4096)"
    )
