"""Plans: the eight axes, presets, rules, and recorded decisions; never imports torch."""

from pipedejavu.plan.axis import Cut, Feed, Keep, Layout, Order, Place, Precision, Reduce, Version
from pipedejavu.plan.plan import AXES, Decision, Plan
from pipedejavu.plan.plan_rule import Rule
from pipedejavu.plan.preset import Preset, preset, presets, sized
from pipedejavu.plan.rule import RULES, check_plan, faults_of

__all__ = [
    "AXES",
    "RULES",
    "Cut",
    "Decision",
    "Feed",
    "Keep",
    "Layout",
    "Order",
    "Place",
    "Plan",
    "Precision",
    "Preset",
    "Reduce",
    "Rule",
    "Version",
    "check_plan",
    "faults_of",
    "preset",
    "presets",
    "sized",
]
