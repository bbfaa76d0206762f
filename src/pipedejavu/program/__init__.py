"""Programs: actions, the table of values, schedules and `compile`; never imports torch."""

from pipedejavu.program.action import KINDS, WHATS, Action, parse_action
from pipedejavu.program.compiler import compile  # noqa: A004
from pipedejavu.program.program import Group, Piece, Program, Worker
from pipedejavu.program.schedule import SCHEDULES, Slot
from pipedejavu.program.value import Effects, Table, Value

__all__ = [
    "KINDS",
    "SCHEDULES",
    "WHATS",
    "Action",
    "Effects",
    "Group",
    "Piece",
    "Program",
    "Slot",
    "Table",
    "Value",
    "Worker",
    "compile",
    "parse_action",
]
