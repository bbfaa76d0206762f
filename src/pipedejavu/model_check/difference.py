"""Finds the first difference, beyond rounding, between a pass of the user's model and a pass of its units.

The tolerance for rounding is measured: a few times the effect of changing every weight in its last place.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipedejavu.model_check.model_pass import Checked, Pass, WholeModel
from pipedejavu.source.rng import seed_all

_SLACK = 8
"""Tolerance, as a multiple of the effect of changing every weight in its last place."""


class Difference(NamedTuple):
    """The first tensor that differs."""

    what: str
    """What differs: output, loss, gradient, state or the number of output tensors."""
    name: str
    """Name of the parameter or buffer; empty for outputs and the loss."""
    size: float
    """Largest absolute difference."""
    scale: float
    """Largest absolute value in the model's tensor."""
    number: int
    """Number of the pass, from 0."""
    draws: tuple[str, ...]
    """Random generators that the model used and its units did not."""


def first_difference(checked: Checked, expected: Pass, made: Pass, number: int) -> Difference | None:
    """Returns the first difference between two passes that exceeds rounding, or None."""
    pairs = list(_pairs(checked.model, expected, made))
    unequal = [n for n, (_, _, one, other) in enumerate(pairs) if not _is_same(one, other)]
    if not unequal:
        return None
    allowed = _rounding(checked, expected, number, [pairs[n][:3] for n in unequal])
    for n, most in zip(unequal, allowed, strict=True):
        what, name, one, other = pairs[n]
        size = _distance(one, other)
        if not size <= most:
            return Difference(what, name, size, _scale(one), number, ())
    return None


def _pairs(model: nn.Module, expected: Pass, made: Pass) -> Iterator[tuple[str, str, Tensor | None, Tensor | None]]:
    """Yields (what, name, tensor of the model, tensor of its units) in the order of computation."""
    device = expected.loss.device
    if len(expected.outputs) != len(made.outputs):
        yield "number of output tensors", "", torch.tensor(len(expected.outputs)), torch.tensor(len(made.outputs))
        return
    for one, other in zip(expected.outputs, made.outputs, strict=True):
        yield "output", "", one, other
    yield "loss", "", expected.loss, made.loss
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name in dict.fromkeys((*reversed(trained), *made.gradients)):
        if name not in trained:
            yield "gradient", name, None, made.gradients[name]
            continue
        none = torch.zeros_like(trained[name], device=device)
        yield "gradient", name, expected.gradients.get(name, none), made.gradients.get(name, none)
    for name, first, start in _named_state(model):
        # A tensor that no unit has must not change.
        known = next((made.state[n] for n in (name, first) if n in made.state), None)
        yield "state", name, expected.state[name], start.detach().to(device) if known is None else known


def _named_state(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yields (name, first name, tensor) of each parameter and buffer; tied ones have several names."""
    firsts: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        yield name, firsts.setdefault(id(tensor), name), tensor


def _rounding(
    checked: Checked, expected: Pass, number: int, wanted: Sequence[tuple[str, str, Tensor | None]]
) -> list[float]:
    """Returns the tolerance for each tensor: a few times the effect of changing every weight in its last place."""
    device = expected.loss.device
    moved = WholeModel(checked.model, checked.cut.method == "chain", checked.loss, device)
    moved.perturb()
    for n in range(number + 1):
        seed_all(n)
        perturbed = moved.run(*checked.samples[n % len(checked.samples)])
    effects: dict[tuple[str, str], list[float]] = {}
    for what, name, one, other in _pairs(checked.model, expected, perturbed):
        effects.setdefault((what, name), []).append(_distance(one, other))
    limits = []
    for what, name, one in wanted:
        if one is None or not one.is_floating_point():
            limits.append(0.0)
            continue
        most = _scale(one) * math.sqrt(torch.finfo(one.dtype).eps)
        effect = max((size for size in effects.get((what, name), ()) if math.isfinite(size)), default=0.0)
        limits.append(min(most, max(_SLACK * effect, _scale(one) * torch.finfo(one.dtype).eps)))
    return limits


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are equal bit for bit; a NaN in the first matches anything."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or (one.is_floating_point() and bool(((one == other) | (one != one)).all()))


def _distance(one: Tensor | None, other: Tensor | None) -> float:
    """Returns the largest absolute difference of two tensors; infinite if shapes or dtypes differ."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    if not one.numel():
        return 0.0
    kind = torch.complex128 if one.is_complex() else torch.float64
    gap = (one.to(kind) - other.to(kind)).abs()
    return float(torch.where((one == other) | ((one != one) & (other != other)), 0.0, gap).nan_to_num(math.inf).max())


def _scale(tensor: Tensor | None) -> float:
    if tensor is None or not tensor.numel():
        return 0.0
    kind = torch.complex128 if tensor.is_complex() else torch.float64
    return float(tensor.to(kind).abs().nan_to_num(0.0, 0.0, 0.0).max())
