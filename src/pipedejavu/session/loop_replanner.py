"""Watches the speed of a Trainer's workers, and searches for another plan in the background if it changes."""

from collections.abc import Sequence

from pipedejavu.facts import Span
from pipedejavu.facts.printable import tell
from pipedejavu.planner.replan import PlanSwitch, Replanner, find_switch
from pipedejavu.program import Program
from pipedejavu.run.throughput import ThroughputMonitor


class LoopReplanner:
    """Keeps the switch that the next step makes, if one pays."""

    def __init__(self, *, is_on: bool):
        self.is_on, self.steps = is_on, 0
        self.switch: PlanSwitch | None = None
        self._replanner: Replanner | None = None

    def follow(self, program: Program) -> None:
        """Starts watching the workers of a program."""
        self.switch = self._replanner = None
        if self.is_on and len(program.workers) > 1:
            self._program = program
            self._replanner = Replanner(ThroughputMonitor(program), self._find, self._request)

    def take_step(self, took_s: float, spans: Sequence[Span]) -> None:
        """Notes the times of a step."""
        self.steps += 1
        if self._replanner is not None:
            self._replanner.throughput.take_round(took_s, spans)
            self._replanner.look()

    def _find(self, slowdowns: Sequence[float]) -> PlanSwitch | None:
        """Searches for a plan that pays; assumes that as many steps follow as were made, since the end is unknown."""
        return find_switch(self._program, slowdowns, self.steps, start_s=0.0)

    def _request(self, switch: PlanSwitch) -> None:
        self.switch = switch
        tell(switch.reason)
