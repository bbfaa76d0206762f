"""Optimizer state in the layout of torch.optim.AdamW: step, both moments, and the low half of a split master."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pipedejavu.facts import InputError
from pipedejavu.hybrid.home import Home, Member

LOW = "master_low"


def read_state(homes: Iterable[Home], state: dict[Tensor, Any]) -> None:
    """Writes views of what rests in each place into an optimizer's `state`."""
    for home in homes:
        for member in home.members:
            if member.state is None or member.step == 0:
                continue
            shape = member.parameter.shape
            found = {
                "step": torch.tensor(float(member.step)),
                "exp_avg": member.state.m.view(shape),
                "exp_avg_sq": member.state.v.view(shape),
            }
            if member.state.low is not None:
                found[LOW] = member.state.low.view(shape)
            state[member.parameter] = found


def fill_state(member: Member, found: dict[str, Any] | None) -> None:
    """Copies a parameter's loaded state, or that of one never updated, to where it rests.

    Without a low half the weight is its own master. An optimizer of torch makes bf16 of what it loads: a low half that
    has been through one, and is older than the weight, is no integer any more.
    """
    assert member.state is not None
    if found is None:
        for tensor in (member.state.m, member.state.v, member.state.low):
            if tensor is not None:
                tensor.zero_()
        member.step = 0
        return
    for name, target in (("exp_avg", member.state.m), ("exp_avg_sq", member.state.v), (LOW, member.state.low)):
        value = found.get(name)
        if target is None:
            continue
        if name == LOW and value is not None and value.dtype != target.dtype:
            value = None
        if value is None and name != LOW:
            raise InputError(f"the state of '{member.name}' has no '{name}'; it is not that of an AdamW")
        if value is not None and value.numel() != target.numel():
            raise InputError(f"'{name}' of '{member.name}' has {value.numel()} elements, not {target.numel()}")
        target.copy_(value.reshape(-1)) if value is not None else target.zero_()
    member.step = int(found["step"])
