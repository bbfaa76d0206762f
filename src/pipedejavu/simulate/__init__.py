"""Simulation: costs, the clock, shared wires, memory, and the remaining time of a run; never imports torch."""

from pipedejavu.simulate.chance import Chance, estimated_chance
from pipedejavu.simulate.fit import check_fit
from pipedejavu.simulate.job_chance import (
    JobChance,
    JobKey,
    PastJob,
    devices_of,
    job_chance,
    key_of,
    scale_of,
)
from pipedejavu.simulate.outlook import Outlook
from pipedejavu.simulate.simulate import Prediction, simulate
from pipedejavu.simulate.unit_cost import parse_unit_costs, unit_costs

__all__ = [
    "Chance",
    "JobChance",
    "JobKey",
    "Outlook",
    "PastJob",
    "Prediction",
    "check_fit",
    "devices_of",
    "estimated_chance",
    "job_chance",
    "key_of",
    "parse_unit_costs",
    "scale_of",
    "simulate",
    "unit_costs",
]
