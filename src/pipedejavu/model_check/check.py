"""The model check: before the first update, the user's own model and its units run the same microbatches.

Cutting a model into units must not change what it computes. So copies of both run forward and backward, at least twice,
with other samples, seeds and Python state each time. Outputs, loss, gradients, and parameters and buffers afterwards
must agree: bit for bit, or else (sums in another order, kernels that are not deterministic) within a few times of what
a change of every weight in its last place does to the uncut model. A model that disagrees is refused.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from pipedejavu.facts import InputError, format_bytes
from pipedejavu.health.failure import is_shortage
from pipedejavu.model_check.difference import Difference, first_difference
from pipedejavu.model_check.model_pass import Checked, DividedModel, Pass, Sample, WholeModel
from pipedejavu.model_check.refusal import describe_difference
from pipedejavu.probe.host import free_memory_bytes
from pipedejavu.profile.module_hook import describe_forward_hooks
from pipedejavu.source.rng import drawn_since, own_randomness, seed_all

__all__ = ["Checked", "Sample", "check_model"]

_ROUNDS, _MORE_ROUNDS = 2, 8
"""How often both run; more often if only the model draws from Python's or numpy's generators: it may matter rarely."""
_COPIES = 5
"""The copy of the model, that of its units, the gradients of both, and about as much again for activations."""

OPTION = "check_model=False"
_UNCHECKED = "the model is not compared with its units"


class _UncopiedError(Exception):
    """A model cannot be copied."""


class _Compared(NamedTuple):
    """What came of all passes."""

    difference: Difference | None
    draws: tuple[str, ...]
    """Generators that the model drew from and its units did not."""
    unused: frozenset[str]
    """Parameters that units train, and that never had a gradient."""


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
    with own_randomness(place), _undisturbed(asked.model, place):
        try:
            found = _compare_all(asked, place)
        except _UncopiedError as error:
            return f"{_UNCHECKED}: it cannot be copied ({error})"
        except (RuntimeError, MemoryError) as error:
            if not is_shortage(error) and place.type == device.type:
                raise
            return f"{_UNCHECKED}: on {place}, {error}"
        if leak := next((name for name, p in asked.model.named_parameters() if p.grad is not None), None):
            return _about_leak(asked, leak)
        if found.difference is not None:
            raise InputError(describe_difference(asked, found.difference, place, option))
        _check_decay(asked, found.unused)
        return _remark(asked, found.draws)


def _check_decay(asked: Checked, unused: frozenset[str]) -> None:
    """Raises InputError for a parameter without gradients that weight decay would change, unlike in a plain loop."""
    optimizer = asked.job.optimizer
    shrunk = sorted(name for name in unused if optimizer.weight_decay and optimizer.decays(name))
    if shrunk:
        raise InputError(
            f"parameter '{shrunk[0]}' of a {type(asked.model).__name__} has no part in the loss: torch's optimizers"
            " leave it as it is, but weight decay would shrink it here; freeze it with requires_grad_(False)"
        )


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
def _undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Puts back the gradients of the user's model, which has none inside, and returns a GPU's memory."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the workers may be other processes, and need it


def _compare_all(asked: Checked, device: torch.device) -> _Compared:
    """Runs both as often as needed, up to the first difference."""
    try:
        whole = WholeModel(asked.model, asked.cut.way == "chain", asked.loss, device)
    except Exception as error:  # whatever a model's own attributes raise
        raise _UncopiedError(str(error)) from error
    divided = DividedModel(asked.model, asked.cut, asked.job, asked.program, device)
    number, rounds, draws = 0, _ROUNDS, tuple[str, ...]()
    unused = frozenset(name for name, p in asked.model.named_parameters() if p.requires_grad)
    while number < rounds:
        passes, drawn = list[Pass](), list[tuple[str, ...]]()
        for side in (whole, divided):
            seed_all(number)
            passes.append(side.run(*asked.samples[number % len(asked.samples)]))
            drawn.append(drawn_since(number))
        draws = tuple(dict.fromkeys((*draws, *(name for name in drawn[0] if name not in drawn[1]))))
        rounds = _MORE_ROUNDS if draws else rounds
        expected, made = passes
        unused = unused.intersection(made.gradients.keys() - expected.gradients.keys())
        found = first_difference(asked, expected, made, number)
        if found is not None:
            return _Compared(found._replace(draws=draws), draws, unused)
        number += 1
    return _Compared(None, draws, unused)
