"""What differs between a pass of the user's model and one of its units, by more than rounding.

Rounding is seen and not assumed: it is a few times what a change of every weight in its last place does to the model.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipedejavu.model_check.model_pass import Checked, Pass, WholeModel
from pipedejavu.source.rng import seed_all

_SLACK = 8
"""How many times the effect of a change in the last place a difference may be."""


class Difference(NamedTuple):
    """The first thing that differs."""

    what: str
    name: str
    """Of the parameter or buffer, if it is one."""
    size: float
    scale: float
    """The largest absolute value of what the model makes."""
    number: int
    """Of the pass, from 0."""
    draws: tuple[str, ...]
    """Generators that the model drew from and its units did not."""


def first_difference(asked: Checked, expected: Pass, made: Pass, number: int) -> Difference | None:
    """Returns the first thing in which two passes differ by more than rounding."""
    pairs = list(_pairs(asked.model, expected, made))
    unequal = [n for n, (_, _, one, other) in enumerate(pairs) if not _is_same(one, other)]
    if not unequal:
        return None
    allowed = _rounding(asked, expected, number, [pairs[n][:3] for n in unequal])
    for n, most in zip(unequal, allowed, strict=True):
        what, name, one, other = pairs[n]
        size = _distance(one, other)
        if not size <= most:
            return Difference(what, name, size, _scale(one), number, ())
    return None


def _pairs(model: nn.Module, expected: Pass, made: Pass) -> Iterator[tuple[str, str, Tensor | None, Tensor | None]]:
    """Yields what is compared, in the order in which it is made: what the model has, and what its units have."""
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
    for name, first, start in _members(model):
        # What no unit has must stay as it was.
        known = next((made.state[n] for n in (name, first) if n in made.state), None)
        yield "state", name, expected.state[name], start.detach().to(device) if known is None else known


def _members(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yields each parameter and buffer with its name, and the first name of it."""
    firsts: dict[int, str] = {}
    members = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in members:
        yield name, firsts.setdefault(id(tensor), name), tensor


def _rounding(
    asked: Checked, expected: Pass, number: int, wanted: Sequence[tuple[str, str, Tensor | None]]
) -> list[float]:
    """Returns how much each of some tensors may differ: a few times what weights moved in the last place do to it."""
    device = expected.loss.device
    moved = WholeModel(asked.model, asked.cut.way == "chain", asked.loss, device)
    moved.perturb()
    for n in range(number + 1):
        seed_all(n)
        found = moved.run(*asked.samples[n % len(asked.samples)])
    effects: dict[tuple[str, str], list[float]] = {}
    for what, name, one, other in _pairs(asked.model, expected, found):
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
    """Whether two tensors have the same bits; a NaN is like a NaN."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or (one.is_floating_point() and bool(((one == other) | (one != one)).all()))


def _distance(one: Tensor | None, other: Tensor | None) -> float:
    """Returns the largest difference of two tensors; infinite if they cannot be compared."""
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
