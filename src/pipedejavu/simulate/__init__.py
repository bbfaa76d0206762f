"""Simulation: costs, the clock, shared wires and memory; never imports torch."""

from pipedejavu.simulate.simulate import Prediction, simulate
from pipedejavu.simulate.unit_cost import parse_unit_costs, unit_costs

__all__ = ["Prediction", "parse_unit_costs", "simulate", "unit_costs"]
