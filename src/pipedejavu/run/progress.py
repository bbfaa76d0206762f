"""The progress of a run: loss, rate, memory, time left. A live view on a terminal, else a line every few seconds.

The estimate of the time left starts from the simulator's forecast and shifts towards the measured steps.
"""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple, Self

from rich.console import Console
from rich.live import Live

from pipedejavu.facts import format_bytes, format_seconds
from pipedejavu.facts.printable import printable
from pipedejavu.run.live_view import LiveView, WorkerPanel
from pipedejavu.simulate import Outlook

INTERVAL_S = 10.0
"""Seconds between two lines when stderr is no terminal."""


def describe_figures(figures: Mapping[str, float]) -> str:
    """Returns the figures of an evaluation in words."""
    words = [f"loss {figures['eval_loss']:.4f}"]
    if "perplexity" in figures:
        words.append(f"perplexity {figures['perplexity']:.4g}")
    if "accuracy" in figures:
        words.append(f"accuracy {figures['accuracy']:.2%}")
    return ", ".join(words)


class Memory(NamedTuple):
    """Peak bytes of a worker: in its process, and on its GPU."""

    host_bytes: int
    gpu_bytes: int
    reserved_bytes: int = 0
    """What its allocator has reserved on the GPU."""

    def form(self) -> dict[str, int]:
        """Returns the fields for the metrics; without a GPU, only those of the process."""
        gpu = {"peak_gpu_bytes": self.gpu_bytes, "peak_reserved_bytes": self.reserved_bytes} if self.gpu_bytes else {}
        return {"peak_bytes": self.host_bytes} | gpu

    def __str__(self) -> str:
        gpu = f" + {format_bytes(self.gpu_bytes)} GPU" if self.gpu_bytes else ""
        return f"{format_bytes(self.host_bytes)}{gpu}"


class Progress:
    """Shows the progress of a run of `steps` updates, of which `done` were made before this process.

    `items` names what is counted ("samples" or "tokens"), `forecast_s` is the forecast seconds per step, and `panels`
    has one entry per worker.
    """

    def __init__(self, steps: int, items: str, forecast_s: float, done: int = 0, panels: Sequence[WorkerPanel] = ()):
        self.steps, self.items, self.done = steps, items, done
        self.outlook = Outlook(forecast_s, steps - done)
        self.last_s = self.started_s = time.perf_counter()
        self.is_live = sys.stderr.isatty()
        self.view = LiveView(steps, done, self._left().strip(), panels=panels, forecast_s=forecast_s)
        self.console = Console(stderr=True, markup=False, emoji=False)
        self.live = Live(self.view, console=self.console) if self.is_live else None
        self.count = 0
        self.num_skipped = 0
        """Number of skipped updates."""

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()

    def report(self, step: int, loss: float, count: int, memory: Memory, elapsed_s: float) -> None:
        """Shows a finished step of `count` samples or tokens, `elapsed_s` after the start."""
        now = time.perf_counter()
        self.count += count
        rate = self.count / (now - self.started_s)
        self.outlook.saw(step - self.done, elapsed_s)
        skipped = f"  {self.num_skipped} skipped" if self.num_skipped else ""
        facts = f"loss {loss:.4f}{skipped}  {rate:,.0f} {self.items}/s  memory {memory}{self._left()}"
        self.view.step, self.view.facts = step, facts
        if math.isfinite(loss):
            self.view.losses.append(loss)
        self.view.measured_s = elapsed_s / (step - self.done)
        if not self.is_live and (now - self.last_s > INTERVAL_S or step in (self.done + 1, self.steps)):
            self.last_s = now
            with suppress(OSError):  # the terminal may be closed
                print(f"step {step}/{self.steps}  {facts}", file=sys.stderr, flush=True)

    def show_evaluation(self, step: int, figures: Mapping[str, float], took_s: float) -> None:
        """Shows the figures of an evaluation; its time does not count in the rate."""
        self.started_s += took_s
        text = f"evaluation after step {step}: {describe_figures(figures)}"
        self.view.evaluation = text
        if not self.is_live:
            with suppress(OSError):
                print(text, file=sys.stderr, flush=True)

    def see(self, worker: int, memory: Memory, busy: Mapping[str, float]) -> None:
        """Shows a worker's report: its peak memory and how busy its lanes were."""
        if worker < len(self.view.panels):
            panel = self.view.panels[worker]
            panel.peak_bytes, panel.busy = memory.gpu_bytes or memory.host_bytes, busy

    def say(self, sentence: str) -> None:
        """Prints a message of this program above the live view."""
        self.note(f"pipedejavu: {sentence}")

    def note(self, text: str) -> None:
        """Prints a text above the live view."""
        with suppress(OSError):
            self.console.print(printable(text), highlight=False, soft_wrap=True)

    def _left(self) -> str:
        """Returns the time left with its 90 % bounds; empty at the end."""
        left = self.outlook.left()
        return f"  {format_seconds(left.time_s)} ± {format_seconds(left.spread_s)} left" if left.time_s else ""
