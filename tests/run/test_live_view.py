"""The live view of a run: what it draws, and that it is drawn on terminals only."""

import os
import pty
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import StringIO
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from rich.console import Console

from pipedejavu.facts import Span
from pipedejavu.run.live_view import CURVE_ROWS, MOST_WORKERS, LiveView, WorkerPanel, draw_curve
from pipedejavu.run.metrics import busy_lanes
from pipedejavu.run.progress import Memory, Progress


def drawn(view: LiveView, height: int = 40) -> list[str]:
    file = StringIO()
    Console(file=file, width=100, height=height).print(view)
    return file.getvalue().splitlines()


def read_to_end(terminal: int) -> bytes:
    """Reads a terminal until its other end is closed: one read returns only what has arrived by then."""
    text = b""
    with suppress(OSError):  # EIO is a terminal's end of file
        while part := os.read(terminal, 1 << 16):
            text += part
    return text


def test_a_curve_falls_from_the_upper_left_to_the_lower_right() -> None:
    assert draw_curve([3, 2, 1, 0], 2, 1) == ["⠑⢄"]
    assert draw_curve([7, 0], 1, 2) == ["⠁", "⢀"]
    assert draw_curve([1, 1], 1, 1) == ["⠉"]
    assert draw_curve([3, 3, 0, 0], 1, 1) == ["⢁"]  # two values to a column


def test_the_view_shows_forecast_beside_reality() -> None:
    panel = WorkerPanel("gpu0 (a100)", 8 * 2**30, 2 * 2**30, 0.75, 4 * 2**30, {"compute": 0.5, "copy-in": 0.25})
    lines = drawn(LiveView(10, 4, "loss 1.0", [4.0, 3.0, 2.0, 1.0], [panel], 0.5, 1.0))
    assert lines[0].startswith("training ")
    assert lines[0].endswith("4/10")
    assert lines[2].startswith("loss 4 ")
    assert lines[1 + CURVE_ROWS].startswith("     1 ")
    assert lines[-2].split("  ") == [
        "0 gpu0 (a100)",
        "████···· 50% (75%)",
        "copy-in 25%",
        "████···· 4.0 GiB of 8.0 GiB (2.0 GiB)",
    ]
    assert lines[-1] == "a step was forecast to take 500 ms, and takes 1 s, 2.00 × that"


def test_a_low_terminal_and_many_workers_leave_out_what_does_not_fit() -> None:
    view = LiveView(10, 4, "loss 1.0", [4.0, 1.0], [WorkerPanel(f"cpu{n}") for n in range(MOST_WORKERS + 3)])
    lines = drawn(view, height=20)
    assert not any(line.startswith("loss 4 ") for line in lines)
    assert "and 3 workers more" in lines


def test_lanes_are_busy_while_they_do_not_wait() -> None:
    spans = [Span(0, "compute", "F0.0@0", 0.0, 1.0), Span(0, "compute", "B0.0@0", 2.0, 4.0)]
    assert busy_lanes([*spans, Span(0, "net-in", "RECV:x0.0<1", 0.0, 4.0)]) == {"compute": 0.75}
    assert busy_lanes([]) == {}


def test_on_a_terminal_the_view_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "40")
    monkeypatch.setenv("TERM", "xterm")
    own, end = pty.openpty()
    with ThreadPoolExecutor(1) as reader, os.fdopen(end, "w", encoding="utf-8") as screen:
        output = reader.submit(read_to_end, own)
        monkeypatch.setattr(sys, "stderr", screen)
        with Progress(2, "samples", 1.0, panels=[WorkerPanel("cpu0")]) as progress:
            progress.see(0, Memory(3 << 20, 0), {"compute": 0.5})
            progress.report(1, 0.5, 4, Memory(3 << 20, 0), 1.0)
            progress.report(2, 0.25, 4, Memory(3 << 20, 0), 2.0)
            progress.say("all is well")
        screen.close()
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.result().decode())
    os.close(own)
    assert "pipedejavu: all is well" in text
    assert "training" in text
    assert "2/2" in text
    assert "0 cpu0  ████···· 50%" in text
    assert "step 2/2" not in text


def test_elsewhere_lines_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "err").open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        with Progress(1, "samples", 1.0, panels=[WorkerPanel("cpu0")]) as progress:
            progress.report(1, 0.5, 4, Memory(3 << 20, 0), 1.0)
    assert (tmp_path / "err").read_text().startswith("step 1/1  loss 0.5000  ")
