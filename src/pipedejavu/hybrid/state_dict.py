"""State dicts in the layout of torch.optim.AdamW: step, both moments, and the low half of a split master."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pipedejavu.facts import InputError
from pipedejavu.hybrid.unit_state import ParamState, UnitState

LOW = "master_low"


def read_state(unit_states: Iterable[UnitState], state: dict[Tensor, Any]) -> None:
    """Fills the `state` of an optimizer with views of the state of all units."""
    for unit_state in unit_states:
        for param in unit_state.params:
            if param.state is None or param.step == 0:
                continue
            shape = param.parameter.shape
            entry = {
                "step": torch.tensor(float(param.step)),
                "exp_avg": param.state.m.view(shape),
                "exp_avg_sq": param.state.v.view(shape),
            }
            if param.state.low is not None:
                entry[LOW] = param.state.low.view(shape)
            state[param.parameter] = entry


def fill_state(param: ParamState, entry: dict[str, Any] | None) -> None:
    """Copies a loaded entry to the state of a parameter; None resets it to the state before the first update.

    Without a low half the master equals the weight. So it does if the low half is not an integer: an optimizer of
    torch, which casts what it loads to bf16, has then updated the weight since. An entry without a step is that of a
    master before its first update.
    """
    assert param.state is not None
    if entry is None or "step" not in entry:
        for tensor in (param.state.m, param.state.v, param.state.low):
            if tensor is not None:
                tensor.zero_()
        if param.state.low is not None and entry is not None:
            param.state.low.copy_(entry[LOW].reshape(-1))
        param.step = 0
        return
    for name, target in (
        ("exp_avg", param.state.m),
        ("exp_avg_sq", param.state.v),
        (LOW, param.state.low),
    ):
        value = entry.get(name)
        if target is None:
            continue
        if name == LOW and value is not None and value.dtype != target.dtype:
            value = None
        if value is None and name != LOW:
            raise InputError(f"the state of '{param.name}' has no '{name}'; it is not that of an AdamW")
        if value is not None and value.numel() != target.numel():
            raise InputError(f"'{name}' of '{param.name}' has {value.numel()} elements, not {target.numel()}")
        target.copy_(value.reshape(-1)) if value is not None else target.zero_()
    param.step = int(entry["step"])
