"""The progress of a run: loss, rate, time left; a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

INTERVAL_S = 10.0


class Progress:
    """Shows how a run of `steps` gets on."""

    def __init__(self, steps: int, is_shown: bool):
        self.steps, self.is_shown = steps, is_shown
        self.last_s = self.started_s = time.perf_counter()
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
        self.is_live = is_shown and sys.stderr.isatty()
        self.bar = Bar(
            *columns, TextColumn("{task.fields[facts]}"), console=Console(stderr=True), disable=not self.is_live
        )
        self.count = 0

    def __enter__(self) -> Self:
        self.bar.start()
        self.line = self.bar.add_task("training", total=self.steps, facts="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def report(self, step: int, loss: float, count: int) -> None:
        """Shows a finished step; `count` samples or tokens were in it."""
        now = time.perf_counter()
        self.count += count
        facts = f"loss {loss:.4f}  {self.count / (now - self.started_s):,.0f} items/s"
        self.bar.update(self.line, completed=step, facts=facts)
        if not self.is_live and (now - self.last_s > INTERVAL_S or step in (1, self.steps)):
            self.last_s = now
            print(f"step {step}/{self.steps}  {facts}", file=sys.stderr, flush=True)
