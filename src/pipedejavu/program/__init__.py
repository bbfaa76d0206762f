"""Programs: actions, the table of values, schedules, `compile` and `verify`; never imports torch."""

from pipedejavu.program.action import KINDS, WHATS, Action, parse_action
from pipedejavu.program.compiler import compile  # noqa: A004
from pipedejavu.program.graph import Graph, build_graph
from pipedejavu.program.program import Group, Piece, Program, Worker
from pipedejavu.program.schedule import SCHEDULES, Slot
from pipedejavu.program.value import Effects, Table, Value
from pipedejavu.program.verify import verify

__all__ = [
    "KINDS",
    "SCHEDULES",
    "WHATS",
    "Action",
    "Effects",
    "Graph",
    "Group",
    "Piece",
    "Program",
    "Slot",
    "Table",
    "Value",
    "Worker",
    "build_graph",
    "compile",
    "parse_action",
    "verify",
]
