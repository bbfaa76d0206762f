"""The optimizer state of a whole model: its units in order, and which modules use which of them."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from pipedejavu.facts import InputError
from pipedejavu.hybrid.lanes import HybridLanes
from pipedejavu.hybrid.model_unit import ModelUnit
from pipedejavu.hybrid.param_state import ParamState
from pipedejavu.hybrid.placement import UnitSize
from pipedejavu.hybrid.unit_state import UnitState, size_of
from pipedejavu.optim.moment_format import MomentFormat


class ModelState:
    """The units of a model that hold trained parameters, with their state."""

    def __init__(
        self,
        units: Iterable[ModelUnit],
        groups: list[dict[str, Any]],
        lanes: HybridLanes,
        moments: MomentFormat = "fp32",
    ):
        self.params: dict[Tensor, ParamState] = {}
        self.uses: list[tuple[nn.Module, list[UnitState]]] = []
        """Modules, and the units whose weights their forward needs."""
        self._unit_of: dict[ParamState, UnitState] = {}
        group_of = {p: group for group in groups for p in group["params"] if p.requires_grad}
        unit_states: dict[ModelUnit, UnitState] = {}
        for unit in units:
            trained = [(name, p) for name, p in unit.parameters.items() if p in group_of]
            params = [
                ParamState(name, p, group_of[p], len(self.params) + n, moments) for n, (name, p) in enumerate(trained)
            ]
            self.params.update({param.parameter: param for param in params})
            if params:
                unit_states[unit] = UnitState(unit, len(unit_states), params, lanes)
                self._unit_of.update(dict.fromkeys(params, unit_states[unit]))
            if used := [unit_states[u] for u in (*unit.shares, unit) if u in unit_states]:
                self.uses.append((unit.module, used))
        self.unit_states = list(unit_states.values())
        if len(self.params) < len(group_of):
            raise InputError(
                f"{len(group_of) - len(self.params)} of {len(group_of)} parameters are not in the model; give the"
                " model that has all of them"
            )

    def unit_of(self, param: ParamState) -> UnitState:
        """Returns the unit of a parameter."""
        return self._unit_of[param]

    @property
    def sizes(self) -> list[UnitSize]:
        """The bytes of each unit in each place."""
        return [size_of(unit_state) for unit_state in self.unit_states]

    @property
    def arrived(self) -> list[ParamState]:
        """The parameters that got a gradient since the last step."""
        return [param for param in self.params.values() if param.arrived]

    def wait(self) -> None:
        """Makes the compute lane wait until all weights are up to date."""
        for unit_state in self.unit_states:
            unit_state.wait()

    def wait_for_moments(self) -> None:
        """Waits until all deferred moments are written."""
        for unit_state in self.unit_states:
            unit_state.wait_for_moments()

    def refresh(self) -> None:
        """Copies weights that were written into the model to the host; weights of windowed blocks are there already."""
        for unit_state in self.unit_states:
            if not unit_state.is_windowed:
                unit_state.refresh()
