"""Programs: actions, values, schedules, the effects of actions and `compile`; never imports torch."""

from pipedejavu.program.action import ACTION_KINDS, Action, ActionKind, UpdatePlace, Via, parse_action
from pipedejavu.program.compiler import compile  # noqa: A004
from pipedejavu.program.effect import Effects, Table
from pipedejavu.program.program import Group, GroupRole, Piece, Program, Worker
from pipedejavu.program.schedule import SCHEDULES, Slot
from pipedejavu.program.value import VALUE_KINDS, Value, ValueKind, ValuePlace

__all__ = [
    "ACTION_KINDS",
    "SCHEDULES",
    "VALUE_KINDS",
    "Action",
    "ActionKind",
    "Effects",
    "Group",
    "GroupRole",
    "Piece",
    "Program",
    "Slot",
    "Table",
    "UpdatePlace",
    "Value",
    "ValueKind",
    "ValuePlace",
    "Via",
    "Worker",
    "compile",
    "parse_action",
]
