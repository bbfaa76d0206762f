"""Optimizer state in the layout of torch.optim.AdamW: step, both moments, and the low half of a split master."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pipedejavu.facts import InputError
from pipedejavu.hybrid.unit_state import ParamState, UnitState

LOW = "master_low"


def read_state(unit_states: Iterable[UnitState], state: dict[Tensor, Any]) -> None:
    """Writes views of what rests in each place into an optimizer's `state`."""
    for unit_state in unit_states:
        for param in unit_state.params:
            if param.state is None or param.step == 0:
                continue
            shape = param.parameter.shape
            found = {
                "step": torch.tensor(float(param.step)),
                "exp_avg": param.state.m.view(shape),
                "exp_avg_sq": param.state.v.view(shape),
            }
            if param.state.low is not None:
                found[LOW] = param.state.low.view(shape)
            state[param.parameter] = found


def fill_state(param: ParamState, found: dict[str, Any] | None) -> None:
    """Copies a parameter's loaded state, or that of one never updated, to where it rests.

    Without a low half the weight is its own master. An optimizer of torch makes bf16 of what it loads: a low half that
    has been through one, and is older than the weight, is no integer any more.
    """
    assert param.state is not None
    if found is None:
        for tensor in (param.state.m, param.state.v, param.state.low):
            if tensor is not None:
                tensor.zero_()
        param.step = 0
        return
    for name, target in (
        ("exp_avg", param.state.m),
        ("exp_avg_sq", param.state.v),
        (LOW, param.state.low),
    ):
        value = found.get(name)
        if target is None:
            continue
        if name == LOW and value is not None and value.dtype != target.dtype:
            value = None
        if value is None and name != LOW:
            raise InputError(f"the state of '{param.name}' has no '{name}'; it is not that of an AdamW")
        if value is not None and value.numel() != target.numel():
            raise InputError(f"'{name}' of '{param.name}' has {value.numel()} elements, not {target.numel()}")
        target.copy_(value.reshape(-1)) if value is not None else target.zero_()
    param.step = int(found["step"])
