"""Simulation: costs, the clock, shared wires, memory, and the remaining time of a run; never imports torch."""

from pipedejavu.simulate.chance import Chance, estimated_chance
from pipedejavu.simulate.fit import check_fit
from pipedejavu.simulate.outlook import Outlook
from pipedejavu.simulate.simulate import Prediction, simulate
from pipedejavu.simulate.unit_cost import parse_unit_costs, unit_costs

__all__ = [
    "Chance",
    "Outlook",
    "Prediction",
    "check_fit",
    "estimated_chance",
    "parse_unit_costs",
    "simulate",
    "unit_costs",
]
