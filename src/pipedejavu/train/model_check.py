"""The model check: before the first update, the user's own model and its units run the same microbatches.

Cutting a model into units must not change what it computes. So copies of both run forward and backward, at least twice,
with other samples, seeds and Python state each time. Outputs, loss, gradients, and parameters and buffers afterwards
must agree: bit for bit, or else (sums in another order, kernels that are not deterministic) within a few times of what
a change of every weight in its last place does to the uncut model. A model that disagrees is refused.
"""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pipedejavu.engine import Job
from pipedejavu.facts import InputError, format_bytes
from pipedejavu.probe.host import free_memory_bytes
from pipedejavu.profile import Cut
from pipedejavu.profile.hook import describe_forward_hooks
from pipedejavu.program import Program
from pipedejavu.train.failure import is_shortage
from pipedejavu.train.model_difference import find_place
from pipedejavu.train.model_pass import DividedModel, Loss, Pass, WholeModel

_ROUNDS, _MORE_ROUNDS = 2, 8
"""How often both run; more often if only the model draws from Python's or numpy's generators: it may matter rarely."""
_COPIES = 5
"""The copy of the model, that of its units, the gradients of both, and about as much again for activations."""
_SLACK = 8
"""How many times the effect of a change in the last place a difference may be."""

OPTION = "check_model=False"
_UNCHECKED = "the model is not compared with its units"


class _UncopiedError(Exception):
    """A model cannot be copied."""


class Sample(NamedTuple):
    """A microbatch as the user has it."""

    inputs: Any
    """As the user's model takes them: a tensor, a tuple of arguments or a mapping of keyword arguments."""
    targets: Any


class Checked(NamedTuple):
    """What is compared: a model, its units in a program's pieces, and microbatches for both."""

    model: nn.Module
    cut: Cut
    job: Job
    loss: Loss
    """On the model's own output."""
    program: Program
    samples: Sequence[Sample]


class _Difference(NamedTuple):
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


def check_model(asked: Checked, device: torch.device, option: str = OPTION) -> str:
    """Raises InputError if a model's units do not compute what the model does.

    Returns what the user should know: why the check was left out, or what it could not see; mostly nothing. `option` is
    how the user leaves the check out.
    """
    state_bytes = sum(t.nbytes for t in (*asked.model.parameters(), *asked.model.buffers()))
    place = _place(state_bytes, device)
    if place is None:
        free = format_bytes(free_memory_bytes())
        return f"{_UNCHECKED}: that takes {format_bytes(_COPIES * state_bytes)} of {free}"
    for sample in asked.samples:
        asked.cut.fit(sample.inputs)
    with _own_randomness(place), _without_gradients(asked.model):
        try:
            found, draws = _compare_all(asked, place)
        except _UncopiedError as error:
            return f"{_UNCHECKED}: it cannot be copied ({error})"
        except (RuntimeError, MemoryError) as error:
            if not is_shortage(error) and place.type == device.type:
                raise
            return f"{_UNCHECKED}: on {place}, {error}"
        if leak := next((name for name, p in asked.model.named_parameters() if p.grad is not None), None):
            return _about_leak(asked, leak)
        if found is None:
            return _remark(asked, draws)
        raise InputError(_sentence(asked, found, place, option))


def _about_leak(asked: Checked, name: str) -> str:
    """Returns why a model was not compared whose copy trains the model itself; refuses one whose units do so."""
    reason = (
        f"a copy of the {type(asked.model).__name__} computes with '{name}' of the model itself, as a hook or function"
    )
    if asked.cut.way == "chain":
        raise InputError(
            f"{reason} that refers to the model by its name does; workers train copies: refer to the module that is"
            " given to the hook, or to self"
        )
    return f"{_UNCHECKED}: {reason} does that refers to the model by its name"


def _remark(asked: Checked, draws: Sequence[str]) -> str:
    """Returns what the check could not see of a model that agrees with its units."""
    if draws:
        return (
            f"the model draws from {' and '.join(draws)}, and its units, which are a recording, do not; in"
            f" {_MORE_ROUNDS} microbatches that made no difference"
        )
    return describe_forward_hooks(asked.model) if asked.cut.way != "chain" else ""


def _place(state_bytes: int, device: torch.device) -> torch.device | None:
    """Returns where there is memory for the check: on a device, else on the CPU, else nowhere."""
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > _COPIES * state_bytes:
        return device
    return torch.device("cpu") if free_memory_bytes() > _COPIES * state_bytes else None


@contextmanager
def _own_randomness(device: torch.device) -> Iterator[None]:
    """Puts back every generator that is seeded inside."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # workers are other processes
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """Puts back the gradients of the user's model, which has none inside."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def _seed(number: int) -> None:
    """Gives every generator a state that depends on the number of a pass alone."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def _drawn(number: int) -> tuple[str, ...]:
    """Returns the generators of Python and numpy that were drawn from since they were seeded."""
    python, numpy = random.getstate(), np.random.get_state()
    _seed(number)
    fresh: Any = np.random.get_state()
    is_numpy = not all(np.array_equal(one, other) for one, other in zip(numpy, fresh, strict=True))
    found = {"Python's random": python != random.getstate(), "numpy.random": is_numpy}
    return tuple(name for name, is_drawn in found.items() if is_drawn)


def _compare_all(asked: Checked, device: torch.device) -> tuple[_Difference | None, tuple[str, ...]]:
    """Runs both as often as needed; returns the first difference, and the generators that only the model drew from."""
    try:
        whole = WholeModel(asked.model, asked.cut.way == "chain", asked.loss, device)
    except Exception as error:  # whatever a model's own attributes raise
        raise _UncopiedError(str(error)) from error
    divided = DividedModel(asked.model, asked.cut, asked.job, asked.program, device)
    number, rounds, missed = 0, _ROUNDS, tuple[str, ...]()
    while number < rounds:
        passes, drawn = list[Pass](), list[tuple[str, ...]]()
        for side in (whole, divided):
            _seed(number)
            passes.append(side.run(*asked.samples[number % len(asked.samples)]))
            drawn.append(_drawn(number))
        only = tuple(name for name in drawn[0] if name not in drawn[1])
        missed = tuple(dict.fromkeys(missed + only))
        rounds = _MORE_ROUNDS if missed else rounds
        found = _first(asked, passes[0], passes[1], number)
        if found is not None:
            return found._replace(draws=missed), missed
        number += 1
    return None, missed


def _first(asked: Checked, expected: Pass, made: Pass, number: int) -> _Difference | None:
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
            return _Difference(what, name, size, _scale(one), number, ())
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
        _seed(n)
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


def _sentence(asked: Checked, found: _Difference, device: torch.device, option: str) -> str:
    """Returns what to tell the user: what differs, where first, by how much, why, and what to do."""
    kind, is_chain = type(asked.model).__name__, asked.cut.way == "chain"
    where = find_place(asked.model, asked.cut, asked.samples, found.number, device, _seed)
    if not where:
        units = (unit for unit, module in asked.cut.units if found.name in _names(unit, module))
        where = f"unit '{next(units, asked.cut.units[-1][0])}'"
    of = {"gradient": f"gradient of '{found.name}'", "state": f"'{found.name}' after a pass"}.get(
        found.what, found.what
    )
    sizes = f"by {found.size:.3g}, where the largest value is {found.scale:.3g}"
    if found.what == "gradient" and not math.isfinite(found.size):
        sizes = "as the parameter is frozen"
    return (
        f"a {kind} and the units that it is cut into do not compute the same: in pass {found.number + 1} with the same"
        f" samples and seeds the {of} differs {sizes}; first in {where}. {_cause(found, is_chain)}; or train the units"
        f" as they are with {option}"
    )


def _names(unit: str, module: nn.Module) -> set[str]:
    members = (
        module.named_parameters(unit, remove_duplicate=False),
        module.named_buffers(unit, remove_duplicate=False),
    )
    return {name for some in members for name, _ in some}


def _cause(found: _Difference, is_chain: bool) -> str:
    """Returns the likely cause and its remedy."""
    if found.draws:
        return (
            f"Its forward draws from {' and '.join(found.draws)}, which happened once while it was recorded; draw with"
            " torch (torch.rand), or outside of the model and give it the numbers as an input"
        )
    if found.what == "state":
        return (
            "Likely a module with running statistics is used more than once by different workers; give each use a"
            " module of its own, or use a plan that keeps the model whole (--plan preset:ddp)"
        )
    if found.what == "gradient":
        return (
            "The outputs agree, so something changes gradients only: a hook on a tensor or a module, or a backward of"
            " its own; compute it in the forward instead"
        )
    if is_chain:
        return (
            "Likely its units share Python state across workers, draw other than with torch's default generators, or"
            " list other than what forward runs; keep such state in one unit, or let forward run the listed units"
        )
    if found.number:
        return (
            "The first pass agrees, so its forward likely depends on Python state that changes from call to call, as a"
            " counter does, or on values of its inputs, which a recording reads once; keep such state in a buffer"
        )
    return (
        "Likely its forward reads something that a recording fixes, as values of its inputs or Python state; compute it"
        " with torch operations"
    )
