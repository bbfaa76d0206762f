"""The error for a model that differs from its units: what differs, where, by how much, why, and what to do."""

import math
from contextlib import suppress

import torch
from torch import nn

from pipedejavu.model_check.difference import Difference
from pipedejavu.model_check.locate import find_place
from pipedejavu.model_check.model_pass import Checked
from pipedejavu.source.rng import seed_all


def describe_difference(checked: Checked, difference: Difference, device: torch.device, option: str) -> str:
    """Returns the error message; `option` is the option that disables the check."""
    kind = type(checked.model).__name__
    where = ""
    with suppress(Exception):  # the difference is certain, its location optional
        where = find_place(checked.model, checked.cut, checked.samples, difference.number, device, seed_all)
    if not where:
        units = (unit for unit, module in checked.cut.units if difference.name in _names(unit, module))
        where = f"unit '{next(units, checked.cut.units[-1][0])}'"
    of = {"gradient": f"gradient of '{difference.name}'", "state": f"'{difference.name}' after a pass"}.get(
        difference.what, difference.what
    )
    sizes = f"by {difference.size:.3g}, where the largest value is {difference.scale:.3g}"
    if difference.what == "gradient" and not math.isfinite(difference.size):
        sizes = "as the parameter is frozen"
    return (
        f"a {kind} and the units that it is cut into do not compute the same: in pass {difference.number + 1} with the"
        f" same samples and seeds the {of} differs {sizes}; first in {where}. {_cause(checked, difference)}; or train"
        f" the units as they are with {option}"
    )


def _names(unit: str, module: nn.Module) -> set[str]:
    named = (
        module.named_parameters(unit, remove_duplicate=False),
        module.named_buffers(unit, remove_duplicate=False),
    )
    return {name for some in named for name, _ in some}


def _cause(checked: Checked, difference: Difference) -> str:
    """Returns the likely cause and its remedy."""
    is_chain = checked.cut.method == "chain"
    if difference.draws:
        return (
            f"Its forward draws from {' and '.join(difference.draws)}, which happened once while it was recorded; draw"
            " with torch (torch.rand), or outside of the model and give it the numbers as an input"
        )
    if difference.what == "state":
        return (
            "Likely a module with running statistics is used more than once by different workers; give each use a"
            " module of its own, or use a plan that keeps the model whole (--plan preset:ddp)"
        )
    if difference.what == "gradient" and is_chain and any(checked.program.recomputed):
        return (
            "The outputs agree, so likely a unit does not repeat what it did when it runs again for its backward: it"
            " draws other than with torch's default generators, or counts its calls; draw with torch, or use a plan"
            " that recomputes nothing"
        )
    if difference.what == "gradient":
        return (
            "The outputs agree, so something changes gradients only: a hook on a tensor or a module, or a backward of"
            " its own; compute it in the forward instead"
        )
    if is_chain:
        return (
            "Likely its units share Python state across workers, draw other than with torch's default generators, or"
            " list other than what forward runs; keep such state in one unit, or let forward run the listed units"
        )
    if difference.number:
        return (
            "The first pass agrees, so its forward likely depends on Python state that changes from call to call, as a"
            " counter does, or on values of its inputs, which a recording reads once; keep such state in a buffer"
        )
    return (
        "Likely its forward reads something that a recording fixes, as values of its inputs or Python state; compute it"
        " with torch operations"
    )
