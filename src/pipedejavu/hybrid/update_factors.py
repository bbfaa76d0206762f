"""The scalar factors of the next update of a unit: what AdamW needs besides gradients and state."""

from pipedejavu.hybrid.param_state import ParamState
from pipedejavu.hybrid.unit_state import UnitState
from pipedejavu.optim.arithmetic import Scalars, scalars_of


def factors_of(unit_state: UnitState, scale: float) -> dict[ParamState, Scalars]:
    """Returns the factors of each parameter that has a gradient; computed once per group and step."""
    known: dict[tuple[int, int], Scalars] = {}
    factors = {}
    for param in unit_state.params:
        key = id(param.group), param.step
        if param.arrived:
            if key not in known:
                known[key] = scalars_of(param.step + 1, *param.setting(), scale)
            factors[param] = known[key]
    return factors
