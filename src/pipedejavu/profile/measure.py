"""Measures a chain on devices of this machine: time, memory and boundary of each unit, at one microbatch.

Everything runs on copies, so that what is measured (batch statistics, say) stays as it was.
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from pipedejavu.facts import Cost, Profile, Tie, Unit, UnitTime
from pipedejavu.profile.chain import Units

REPEATS = 3
_WARM_UPS = {"cpu": 1, "cuda": 3}
"""A GPU's first passes load kernels and choose algorithms."""


def measure_profile(
    name: str,
    units: Units,
    ties: Sequence[frozenset[str]],
    sample: Any,
    target: Any,
    loss: Callable[[Any, Any], Tensor],
    kinds: Mapping[str, torch.device],
) -> Profile:
    """Runs each unit forward and backward on one microbatch, on a device of each kind.

    `ties` are the full names of parameters that units share. Times grow with the samples; the backward's weight half
    is taken as half of it.
    """
    times: list[dict[str, UnitTime]] = [{} for _ in units]
    found: list[Unit] = []
    for kind, device in kinds.items():
        value, goal = _moved(sample, device), _moved(target, device)
        size = len(_tensors(target)[0])
        found = []
        for index, (unit, module) in enumerate(units):
            own = copy.deepcopy(module).to(device)
            head = partial(_loss, loss, goal) if index == len(units) - 1 else None
            measured, value = _measure(own, value, head)
            times[index][kind] = _unit_time(own, measured, size)
            found.append(_unit(unit, own, measured, value, size))
    described = tuple(unit.but(times=own) for unit, own in zip(found, times, strict=True))
    return Profile(name=name, units=described, ties=_ties(ties, units))


def _loss(loss: Callable[[Any, Any], Tensor], target: Any, output: Any) -> Tensor:
    return loss(output, target)


def merge_profiles(profiles: Sequence[Profile]) -> Profile:
    """Joins profiles of one model that were measured on different kinds of devices."""
    units = []
    for same in zip(*(profile.units for profile in profiles), strict=True):
        units.append(same[0].but(times={kind: times for unit in same for kind, times in unit.times.items()}))
    return profiles[0].but(units=tuple(units))


def _ties(ties: Sequence[frozenset[str]], units: Units) -> tuple[Tie, ...]:
    """Returns the profile's form of parameters that units share, in the order given."""
    owned = [(u, n, p.nbytes) for u, m in units for n, p in m.named_parameters(prefix=u, remove_duplicate=False)]
    found = []
    for names in ties:
        homes = {unit: size for unit, full, size in owned if full in names}
        found.append(Tie(units=tuple(homes), size_bytes=max(homes.values())))
    return tuple(found)


class _Stopwatch:
    """Times between marks: by the clock on a CPU, by events of the stream on a GPU, which works behind the host."""

    def __init__(self, device: torch.device):
        self.device = device
        self.marks: list[Any] = []

    def mark(self) -> None:
        """Ends the last stretch and begins the next."""
        if self.device.type == "cpu":
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        self.marks.append(event)

    def times_s(self) -> list[float]:
        """Returns the stretches between the marks, once the device has passed the last."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        if self.device.type == "cpu":
            return [end - start for start, end in pairs]
        self.marks[-1].synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in pairs]


class _Measured:
    """What one unit's forward and backward take each time, and the bytes that autograd saved."""

    def __init__(self) -> None:
        self.forward_s: list[float] = []
        self.backward_s: list[float] = []
        self.saved_bytes = 0


def _measure(module: nn.Module, value: Any, head: Callable[[Any], Tensor] | None) -> tuple[_Measured, Any]:
    measured = _Measured()
    output: Any = None
    device = _tensors(value)[0].device
    warm_ups = _WARM_UPS[device.type]
    for repeat in range(warm_ups + REPEATS):
        # Copies of the inputs: a unit may change what it is given in place.
        inputs = [t.detach().requires_grad_(t.is_floating_point()).clone() for t in _tensors(value)]
        saved: dict[int, int] = {}

        def keep(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        watch = _Stopwatch(device)
        watch.mark()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = module(tuple(inputs) if isinstance(value, tuple) else inputs[0])
            ends = _tensors(head(output) if head else output)
        watch.mark()
        roots = [t for t in ends if t.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        watch.mark()
        module.zero_grad()
        forward_s, backward_s = watch.times_s()
        if repeat >= warm_ups:
            measured.forward_s.append(forward_s)
            measured.backward_s.append(backward_s)
        own = {p.untyped_storage().data_ptr() for p in module.parameters()}
        measured.saved_bytes = sum(size for where, size in saved.items() if where not in own)
    detached = [t.detach() for t in _tensors(output)]
    return measured, tuple(detached) if isinstance(output, tuple) else detached[0]


def _unit_time(module: nn.Module, measured: _Measured, size: int) -> UnitTime:
    forward = Cost(per_sample_s=median(measured.forward_s) / size)
    backward = median(measured.backward_s) / size
    has_weights = any(True for _ in module.parameters())
    return UnitTime(
        forward=forward,
        backward=Cost(per_sample_s=backward),
        weight_backward=Cost(per_sample_s=backward / 2 if has_weights else 0.0),
        recompute=forward,
        update_s=_update_s(module),
    )


def _unit(name: str, module: nn.Module, measured: _Measured, output: Any, size: int) -> Unit:
    parameters = sum(p.nbytes for p in module.parameters())
    return Unit(
        name=name,
        parameter_bytes=parameters,
        gradient_bytes=parameters,
        optimizer_bytes=2 * parameters,
        activation_bytes=measured.saved_bytes / size,
        boundary_bytes=sum(t.nbytes for t in _tensors(output)) / size,
        has_batch_statistics=any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()),
    )


def _update_s(module: nn.Module) -> float:
    """Times passes like those of an AdamW step over the parameters."""
    parameters = [p.detach() for p in module.parameters()]
    if not parameters:
        return 0.0
    watch = _Stopwatch(parameters[0].device)
    for _ in range(2):  # the first pass warms up
        watch.mark()
        for parameter in parameters:
            state = torch.zeros_like(parameter)
            for _ in range(2):
                state.mul_(0.9).add_(parameter, alpha=0.1)
            parameter + state.sqrt().add_(1e-8).reciprocal_()
    watch.mark()
    return watch.times_s()[-1]


def _moved(value: Any, device: torch.device) -> Any:
    """Returns a tensor, or a tuple of them, on a device."""
    if isinstance(value, tuple):
        return tuple(_moved(v, device) for v in value)
    return value.to(device) if isinstance(value, Tensor) else value


def _tensors(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, tuple) else [value]
