"""Times parts of a step: on a GPU by events of its stream, and on the host by its clock."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Measures time: a GPU's by stream events, and the host's, which is the device's on a CPU."""

    def __init__(self, device: torch.device):
        self.device = device
        self.host_s: dict[str, float] = {}
        self.events: dict[str, tuple[Any, Any]] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times what runs inside the `with` block."""
        begin = self._event()
        start = time.perf_counter()
        yield
        self.host_s[name] = time.perf_counter() - start
        self.events[name] = begin, self._event()

    def _event(self) -> Any:
        if self.device.type == "cpu":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def time_s(self, name: str) -> float:
        """Waits for a part to finish; returns its device time, or 0 if it did not run."""
        if name not in self.events:
            return 0.0
        begin, end = self.events[name]
        if end is None:
            return self.host_s[name]
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000
