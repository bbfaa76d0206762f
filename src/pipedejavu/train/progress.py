"""The progress of a run: loss, rate, memory, time left; a bar on a terminal, a line now and then elsewhere.

The time left is the simulator's forecast at first, and then more and more what the run's own steps say.
"""

import sys
import time
from types import TracebackType
from typing import NamedTuple, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from pipedejavu.facts import format_bytes, format_seconds
from pipedejavu.simulate import Outlook

INTERVAL_S = 10.0


class Memory(NamedTuple):
    """Most bytes that any worker has had: in its process, and on its GPU."""

    host_bytes: int
    gpu_bytes: int

    def form(self) -> dict[str, int]:
        """Returns it for the metrics; without a GPU there is nothing to say of one."""
        return {"peak_bytes": self.host_bytes} | ({"peak_gpu_bytes": self.gpu_bytes} if self.gpu_bytes else {})

    def __str__(self) -> str:
        gpu = f" + {format_bytes(self.gpu_bytes)} GPU" if self.gpu_bytes else ""
        return f"{format_bytes(self.host_bytes)}{gpu}"


class Progress:
    """Shows how a run of `steps` gets on, of which some are `done` already and each is forecast to take `forecast_s`.

    `items` are samples or tokens.
    """

    def __init__(self, steps: int, items: str, forecast_s: float, done: int = 0):
        self.steps, self.items, self.done = steps, items, done
        self.outlook = Outlook(forecast_s, steps - done)
        self.last_s = self.started_s = time.perf_counter()
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
        self.is_live = sys.stderr.isatty()
        self.bar = Bar(
            *columns, TextColumn("{task.fields[facts]}"), console=Console(stderr=True), disable=not self.is_live
        )
        self.count = 0

    def __enter__(self) -> Self:
        self.bar.start()
        self.line = self.bar.add_task("training", total=self.steps, completed=self.done, facts=self._left())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def report(self, step: int, loss: float, count: int, memory: Memory, elapsed_s: float) -> None:
        """Shows a finished step: `count` samples or tokens were in it, and so long after the start it was known."""
        now = time.perf_counter()
        self.count += count
        rate = self.count / (now - self.started_s)
        self.outlook.saw(step - self.done, elapsed_s)
        facts = f"loss {loss:.4f}  {rate:,.0f} {self.items}/s  memory {memory}{self._left()}"
        self.bar.update(self.line, completed=step, facts=facts)
        if not self.is_live and (now - self.last_s > INTERVAL_S or step in (self.done + 1, self.steps)):
            self.last_s = now
            print(f"step {step}/{self.steps}  {facts}", file=sys.stderr, flush=True)

    def say(self, sentence: str) -> None:
        """Shows a sentence beside the bar."""
        self.bar.console.print(f"pipedejavu: {sentence}", highlight=False, markup=False, soft_wrap=True)

    def _left(self) -> str:
        """Returns what is left, with what nine runs of ten keep to; nothing at the end."""
        left = self.outlook.left()
        return f"  {format_seconds(left.time_s)} ± {format_seconds(left.spread_s)} left" if left.time_s else ""
