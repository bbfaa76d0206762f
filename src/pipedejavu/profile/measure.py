"""Measures a chain on this machine's CPU: time, memory and boundary of each unit, at one microbatch."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from pipedejavu.facts import Cost, Profile, Tie, Unit, UnitTime
from pipedejavu.profile.chain import Units

REPEATS = 3
_WARM_UPS = 1


def measure_profile(
    name: str,
    units: Units,
    ties: Sequence[frozenset[str]],
    sample: Any,
    target: Any,
    loss: Callable[[Any, Any], Tensor],
    kind: str,
) -> Profile:
    """Runs each unit forward and backward on one microbatch; returns the profile for devices of `kind`.

    `ties` are the full names of parameters that units share. Times grow with the samples; the backward's weight half
    is taken as half of it.
    """
    value, found = sample, []
    size = len(_tensors(sample)[0])
    for index, (unit, module) in enumerate(units):
        head = (lambda out: loss(out, target)) if index == len(units) - 1 else None
        measured, value = _measure(module, value, head)
        found.append(_unit(unit, module, measured, value, size, kind))
    return Profile(name=name, units=tuple(found), ties=_ties(ties, units))


def _ties(ties: Sequence[frozenset[str]], units: Units) -> tuple[Tie, ...]:
    """Returns the profile's form of parameters that units share, in the order given."""
    owned = [(u, f"{u}.{n}", p.nbytes) for u, m in units for n, p in m.named_parameters(remove_duplicate=False)]
    found = []
    for names in ties:
        homes = {unit: size for unit, full, size in owned if full in names}
        found.append(Tie(units=tuple(homes), size_bytes=max(homes.values())))
    return tuple(found)


class _Measured:
    """Medians of one unit's forward and backward, and the bytes that autograd saved."""

    def __init__(self) -> None:
        self.forward_s: list[float] = []
        self.backward_s: list[float] = []
        self.saved_bytes = 0


def _measure(module: nn.Module, value: Any, head: Callable[[Any], Tensor] | None) -> tuple[_Measured, Any]:
    measured = _Measured()
    output: Any = None
    for repeat in range(_WARM_UPS + REPEATS):
        inputs = [t.detach().requires_grad_(t.is_floating_point()) for t in _tensors(value)]
        saved: dict[int, int] = {}

        def keep(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        started = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = module(tuple(inputs) if isinstance(value, tuple) else inputs[0])
            ends = _tensors(head(output) if head else output)
        between = time.perf_counter()
        roots = [t for t in ends if t.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        ended = time.perf_counter()
        module.zero_grad()
        if repeat >= _WARM_UPS:
            measured.forward_s.append(between - started)
            measured.backward_s.append(ended - between)
        own = {p.untyped_storage().data_ptr() for p in module.parameters()}
        measured.saved_bytes = sum(size for where, size in saved.items() if where not in own)
    detached = [t.detach() for t in _tensors(output)]
    return measured, tuple(detached) if isinstance(output, tuple) else detached[0]


def _unit(name: str, module: nn.Module, measured: _Measured, output: Any, size: int, kind: str) -> Unit:
    parameters = sum(p.nbytes for p in module.parameters())
    forward = Cost(per_sample_s=median(measured.forward_s) / size)
    backward = median(measured.backward_s) / size
    return Unit(
        name=name,
        times={
            kind: UnitTime(
                forward=forward,
                backward=Cost(per_sample_s=backward),
                weight_backward=Cost(per_sample_s=backward / 2 if parameters else 0.0),
                recompute=forward,
                update_s=_update_s(module),
            )
        },
        parameter_bytes=parameters,
        gradient_bytes=parameters,
        optimizer_bytes=2 * parameters,
        activation_bytes=measured.saved_bytes / size,
        boundary_bytes=sum(t.nbytes for t in _tensors(output)) / size,
        has_batch_statistics=any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()),
    )


def _update_s(module: nn.Module) -> float:
    """Times passes like those of an AdamW step over the parameters."""
    started = time.perf_counter()
    for parameter in module.parameters():
        state = torch.zeros_like(parameter)
        for _ in range(2):
            state.mul_(0.9).add_(parameter.detach(), alpha=0.1)
        parameter.detach() + state.sqrt().add_(1e-8).reciprocal_()
    return time.perf_counter() - started


def _tensors(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, tuple) else [value]
