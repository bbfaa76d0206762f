"""bf16 training with float32 masters as a plain loop, and plans to compare with it."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from pipedejavu.engine import AdamW, Sgd
from pipedejavu.optim.arithmetic import AdamState, join, scalars_of, split, update_
from pipedejavu.optim.moment_format import MomentFormat, zero_moments
from pipedejavu.plan import Precision
from tests.engine.case import Case, sum_of_losses

SPLIT = Precision(compute="bf16", masters="split")


def in_precision(case: Case, precision: Precision = SPLIT) -> Case:
    """Returns a case whose plan has this precision."""
    return replace(case, plan=case.plan.replace(precision=precision))


def is_matrix(module: nn.Module, parameter: Tensor) -> bool:
    """Whether a user who lowers weights by hand would lower this one: matrices and filters, but no norm."""
    return parameter.dim() > 1 and not isinstance(module, nn.LayerNorm | nn.BatchNorm2d)


def train_plainly(
    case: Case,
    *,
    groups: int = 1,
    splits: bool = True,
    is_mean: bool = False,
    accumulate: torch.dtype = torch.float32,
    moments: MomentFormat = "fp32",
) -> dict[str, Tensor]:
    """Returns the masters after training all microbatches of each update in one process.

    The microbatches of an update are summed in `groups` equal parts, as replicas do, and then over the parts. With
    `is_mean` the loss is the mean over the update's samples, as users write it.
    """
    device, size = case.device, case.program.update_size
    modules = [module.to(device) for module in copy.deepcopy([module for _, module in case.units])]
    parts = [(f"{unit}.{path}".rstrip("."), part) for (unit, _), m in zip(case.units, modules, strict=True)
             for path, part in m.named_modules()]  # fmt: skip
    seen: dict[int, tuple[str, nn.Parameter, bool]] = {}
    for path, part in parts:
        for name, p in part.named_parameters(recurse=False):
            seen.setdefault(id(p), (f"{path}.{name}", p, splits and is_matrix(part, p)))
    states = {}
    for name, p, is_low in seen.values():
        weight, low = split(p.detach().clone()) if is_low else (p.detach().clone(), None)
        p.data = weight
        m, v, *scales = zero_moments(moments, weight.numel(), device)
        states[name] = AdamState(weight, low, m.view(weight.shape), v.view(weight.shape), *scales)
    for update in range(case.updates):
        members = range(update * size, (update + 1) * size)
        count = sum(case.batches.count(i) for i in members)
        sums = [_gradients(case, modules, some, seen.values(), count if is_mean else 1, accumulate)
                for some in _parted(members, groups)]  # fmt: skip
        for name, p, _ in seen.values():
            gradient = sums[0][name] if groups == 1 else torch.stack([s[name].float() for s in sums]).sum(0)
            states[name] = _updated(case.optimizer, update, gradient, states[name], 1.0 if is_mean else 1 / count)
            p.data = states[name].weight
    return {n: (s.weight if s.low is None else join(s.weight, s.low)).cpu() for n, s in states.items()}


def _parted(members: range, groups: int) -> list[range]:
    size = len(members) // groups
    return [members[n * size : (n + 1) * size] for n in range(groups)]


def _gradients(case, modules, members, parameters, divisor, accumulate) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    sums: dict[str, Tensor] = {}
    for i in members:
        with torch.autocast(case.device.type, torch.bfloat16):
            output = case.forward(modules, i)
            loss = sum_of_losses(output, case.batches.targets(i).to(case.device)) / divisor
        loss.backward()
        for name, p, _ in parameters:
            if len(members) > 1:
                sums[name] = sums[name].add_(p.grad) if name in sums else p.grad.to(_wider(p, accumulate), copy=True)
            else:
                sums[name] = p.grad
            p.grad = None
    return sums


def _wider(parameter: Tensor, dtype: torch.dtype) -> torch.dtype:
    return parameter.dtype if parameter.dtype == torch.float32 else dtype


def _updated(optimizer: Sgd | AdamW, update: int, gradient: Tensor, state: AdamState, scale: float) -> AdamState:
    new = state._replace(weight=state.weight.clone(), low=None if state.low is None else state.low.clone())
    if isinstance(optimizer, AdamW):
        settings = optimizer.rate(update), optimizer.betas, optimizer.eps, optimizer.weight_decay
        update_(scalars_of(update + 1, *settings, scale), gradient, state, new)
        return new
    master = state.weight if state.low is None else join(state.weight, state.low)
    step = gradient.float() * scale
    state.m.mul_(optimizer.momentum).add_(step) if update else state.m.copy_(step)
    master = master + state.m * -optimizer.rate(update)
    halves: Sequence[Tensor] = (master,) if state.low is None else split(master)
    return AdamState(halves[0], None if state.low is None else halves[1], state.m, state.v)
