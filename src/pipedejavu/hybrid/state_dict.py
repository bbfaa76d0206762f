"""State dicts in the layout of torch.optim.AdamW: step, both moments, and the low half of a split master.

int8 moments are saved as codes and scales, under names that torch.optim.AdamW does not take for its own.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pipedejavu.facts import InputError
from pipedejavu.hybrid.param_state import ParamState
from pipedejavu.hybrid.unit_state import UnitState
from pipedejavu.optim.arithmetic import AdamState
from pipedejavu.optim.moment_format import Moments, convert_moments, num_scales, widened

LOW = "master_low"
MOMENTS = "exp_avg", "exp_avg_sq"
CODES = "exp_avg_code", "exp_avg_sq_code", "exp_avg_scale", "exp_avg_sq_scale"
"""The codes of int8 moments, and their scales."""


def read_state(unit_states: Iterable[UnitState], state: dict[Tensor, Any]) -> None:
    """Fills the `state` of an optimizer with views of the state of all units."""
    for unit_state in unit_states:
        for param in unit_state.params:
            if param.state is None or param.step == 0:
                continue
            shape = param.parameter.shape
            entry = {"step": torch.tensor(float(param.step)), **_entry_of(param.state, shape)}
            if param.state.low is not None:
                entry[LOW] = param.state.low.view(shape)
            state[param.parameter] = entry


def _entry_of(state: AdamState, shape: torch.Size) -> dict[str, Tensor]:
    """Returns the moments of a parameter by their names in a state dict."""
    if state.m_scale is None or state.v_scale is None:
        return dict(zip(MOMENTS, (state.m.view(shape), state.v.view(shape)), strict=True))
    return dict(zip(CODES, (state.m.view(shape), state.v.view(shape), state.m_scale, state.v_scale), strict=True))


def fill_state(param: ParamState, entry: dict[str, Any] | None) -> None:
    """Copies a loaded entry to the state of a parameter; None resets it to the state before the first update.

    Without a low half the master equals the weight. So it does if the low half is not an integer: an optimizer of
    torch, which casts what it loads to bf16, has then updated the weight since. An entry without a step is that of a
    master before its first update.
    """
    assert param.state is not None
    if entry is None or "step" not in entry:
        for tensor in param.state[1:]:
            if tensor is not None:
                tensor.zero_()
        if param.state.low is not None and entry is not None:
            param.state.low.copy_(entry[LOW].reshape(-1))
        param.step = 0
        return
    moments = _moments_of(param, entry)
    low = entry.get(LOW)
    if param.state.low is not None:
        is_low = low is not None and low.dtype == param.state.low.dtype
        param.state.low.copy_(_checked(param, LOW, low, param.numel)) if is_low else param.state.low.zero_()
    convert_moments(moments, param.state.moments)
    param.step = int(entry["step"])


def plain_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns an entry with float32 moments in place of the codes and scales of int8 ones, as torch.optim.AdamW has."""
    if CODES[0] not in entry:
        return entry
    m, v, m_scale, v_scale = (entry[name] for name in CODES)
    rest = {name: value for name, value in entry.items() if name not in CODES}
    return rest | dict(zip(MOMENTS, (widened(m, m_scale), widened(v, v_scale)), strict=True))


def _moments_of(param: ParamState, entry: dict[str, Any]) -> Moments:
    """Returns the moments of a loaded entry, in the format that they were saved in."""
    if CODES[0] in entry:
        counts = param.numel, param.numel, num_scales(param.numel), num_scales(param.numel)
        return Moments(*(_checked(param, name, entry.get(name), n) for name, n in zip(CODES, counts, strict=True)))
    return Moments(*(_checked(param, name, entry.get(name), param.numel) for name in MOMENTS))


def _checked(param: ParamState, name: str, value: Tensor | None, numel: int) -> Tensor:
    """Returns a loaded tensor, one-dimensional; raises InputError if it is missing or does not fit."""
    if value is None:
        raise InputError(f"the state of '{param.name}' has no '{name}'; it is not that of an AdamW")
    if value.numel() != numel:
        raise InputError(f"'{name}' of '{param.name}' has {value.numel()} elements, not {numel}")
    return value.reshape(-1)
