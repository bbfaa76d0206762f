"""The model check: verifies before the first update that a model's units compute what the model computes.

Copies of the model and of its units run the same microbatches forward and backward, at least twice, with different
samples, seeds and Python state each time. Outputs, loss, gradients, and parameters and buffers afterwards must agree:
bit for bit, or up to rounding if sums run in another order or kernels are not deterministic. The tolerance is a few
times the effect of changing every weight in its last place. A model that disagrees is refused.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from pipedejavu.facts import InputError, format_bytes
from pipedejavu.facts.start_phase import START
from pipedejavu.health.failure import is_shortage
from pipedejavu.model_check.difference import Difference, first_difference
from pipedejavu.model_check.model_pass import Checked, DividedModel, Pass, Sample, WholeModel
from pipedejavu.model_check.refusal import describe_difference
from pipedejavu.probe.host import free_memory_bytes
from pipedejavu.profile.module_hook import describe_forward_hooks
from pipedejavu.runtime.device_memory import DeviceMemory
from pipedejavu.source.rng import drawn_since, preserve_rng, seed_all

__all__ = ["Checked", "Sample", "check_model"]

_ROUNDS, _MORE_ROUNDS = 2, 8
"""Number of passes; more if the model draws from Python's or numpy's generators, as differences may be rare."""
_COPIES = 5
"""Memory of the check in multiples of the model: two copies, two sets of gradients, and activations."""

_MOST_FLOP = 20e12
"""Work that a check for a GPU may leave to the CPU, which takes about ten seconds for it."""

OPTION = "check_model=False"
_UNCHECKED = "the model is not compared with its units"


class _UncopiedError(Exception):
    """Raised if a model cannot be copied."""


class _Compared(NamedTuple):
    """The outcome of all passes."""

    difference: Difference | None
    draws: tuple[str, ...]
    """Random generators that the model used and its units did not."""
    unused: frozenset[str]
    """Trained parameters that never got a gradient."""


def check_model(checked: Checked, device: torch.device, option: str = OPTION) -> str:
    """Raises InputError if a model's units do not compute what the model does.

    Returns a message for the user, usually empty: why the check was skipped, or what it could not verify. `option` is
    the option, named in errors, that disables the check.
    """
    state_bytes = sum(t.nbytes for t in (*checked.model.parameters(), *checked.model.buffers()))
    check_device, reason = _choose_device(checked, state_bytes, device)
    if check_device is None:
        return f"{_UNCHECKED}: that takes {format_bytes(_COPIES * state_bytes)} of {reason}"
    for sample in checked.samples:
        checked.cut.fit(sample.inputs)
    with START.phase("check"), preserve_rng(check_device), _undisturbed(checked.model, check_device):
        try:
            outcome = _compare_all(checked, check_device)
        except _UncopiedError as error:
            return f"{_UNCHECKED}: it cannot be copied ({error})"
        except (RuntimeError, MemoryError) as error:
            if not is_shortage(error) and check_device.type == device.type:
                raise
            return f"{_UNCHECKED}: on {check_device}, {error}"
        if leak := next((name for name, p in checked.model.named_parameters() if p.grad is not None), None):
            return _about_leak(checked, leak)
        if outcome.difference is not None:
            raise InputError(describe_difference(checked, outcome.difference, check_device, option))
        _check_decay(checked, outcome.unused)
        return _remark(checked, outcome.draws)


def _check_decay(checked: Checked, unused: frozenset[str]) -> None:
    """Raises InputError if weight decay would change a parameter without gradients, which torch's optimizers skip."""
    shrunk = sorted(name for name in unused if checked.job.optimizer.shrinks(name))
    if shrunk:
        raise InputError(
            f"parameter '{shrunk[0]}' of a {type(checked.model).__name__} has no part in the loss: torch's optimizers"
            " leave it as it is, but weight decay would shrink it here; freeze it with requires_grad_(False)"
        )


def _about_leak(checked: Checked, name: str) -> str:
    """Returns why the check was skipped if a copy refers to the original model; raises InputError for a chain."""
    kind = type(checked.model).__name__
    reason = f"a copy of the {kind} computes with '{name}' of the model itself, as a hook or function"
    if checked.cut.method == "chain":
        raise InputError(
            f"{reason} that refers to the model by its name does; workers train copies: refer to the module that is"
            " given to the hook, or to self"
        )
    return f"{_UNCHECKED}: {reason} does that refers to the model by its name"


def _remark(checked: Checked, draws: Sequence[str]) -> str:
    """Returns a message about what the check could not verify; empty if there is nothing."""
    if draws:
        return (
            f"the model draws from {' and '.join(draws)}, and its units, which are a recording, do not; in"
            f" {_MORE_ROUNDS} microbatches that made no difference"
        )
    return describe_forward_hooks(checked.model) if checked.cut.method != "chain" else ""


def _choose_device(checked: Checked, state_bytes: int, device: torch.device) -> tuple[torch.device | None, str]:
    """Returns a device for the check: `device`, else the CPU; or None, and what there is too little of."""
    needed, free, said = _COPIES * state_bytes, free_memory_bytes(), ""
    if device.type == "cuda":
        free_gpu = DeviceMemory(device).free_bytes()
        if free_gpu > needed:
            return device, ""
        said = f"{format_bytes(free_gpu)} on the GPU"
        flop = 3 * sum(unit.flop for unit in checked.program.profile.units)  # forward and backward of a sample
        work = 2 * _ROUNDS * flop * max(checked.program.sizes, default=0)
        if work > _MOST_FLOP:
            return None, f"{said}, and {work / 1e12:,.0f} TFLOP are too many for the CPU"
    if free > needed:
        return torch.device("cpu"), ""
    return None, f"{said} and {format_bytes(free)} on the host" if said else format_bytes(free)


@contextmanager
def _undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Clears the gradients of the user's model, restores them on exit, and frees cached GPU memory."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
        if device.type == "cuda":
            torch.cuda.empty_cache()  # workers in other processes need the memory


def _compare_all(checked: Checked, device: torch.device) -> _Compared:
    """Runs the passes of both models until the first difference."""
    try:
        whole = WholeModel(checked.model, checked.cut.method == "chain", checked.loss, device)
    except Exception as error:  # attributes of a model may raise anything
        raise _UncopiedError(str(error)) from error
    divided = DividedModel(checked.model, checked.cut, checked.job, checked.program, device)
    number, rounds, draws = 0, _ROUNDS, tuple[str, ...]()
    unused = frozenset(name for name, p in checked.model.named_parameters() if p.requires_grad)
    while number < rounds:
        passes, drawn = list[Pass](), list[tuple[str, ...]]()
        for side in (whole, divided):
            seed_all(number)
            passes.append(side.run(*checked.samples[number % len(checked.samples)]))
            drawn.append(drawn_since(number))
        draws = tuple(dict.fromkeys((*draws, *(name for name in drawn[0] if name not in drawn[1]))))
        rounds = _MORE_ROUNDS if draws else rounds
        expected, made = passes
        unused = unused.intersection(made.gradients.keys() - expected.gradients.keys())
        difference = first_difference(checked, expected, made, number)
        if difference is not None:
            return _Compared(difference._replace(draws=draws), draws, unused)
        number += 1
    return _Compared(None, draws, unused)
