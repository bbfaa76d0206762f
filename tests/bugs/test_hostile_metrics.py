"""Metrics that others have written: rows that this program cannot have written are left out, wherever they are read."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from pipedejavu.cli import runs_command
from pipedejavu.facts import InputError
from pipedejavu.plan import preset
from pipedejavu.run import History, RunFolder, TrainOptions

GOOD = [
    {"step": 1, "loss": 2.5, "count": 8, "samples": 8, "elapsed_s": 0.5, "peak_bytes": 7},
    {"saved": 1, "size_bytes": 9, "took_s": 0.1},
    {"step": 2, "loss": 2.0, "count": 8, "samples": 8, "elapsed_s": 1.0},
    {"shares": [0.5, 0.5]},
    {"step": 3, "loss": float("nan"), "skipped": True},
    {"step": 4, "loss": None},
    {"skipped": 5, "reason": "a gradient is not finite"},
]
ODD: list[Any] = [
    None, 3, "x", [], [1], {"loss": 1.0}, {"step": "x"}, {"step": 1.5, "loss": 1}, {"step": True, "loss": 1},
    {"step": 10**400, "loss": 1}, {"step": 1, "loss": "x"}, {"step": 1, "loss": 10**400}, {"step": 1, "loss": [1]},
    {"step": 1, "loss": 1, "samples": "x"}, {"step": 1, "loss": 1, "elapsed_s": None}, {"peak_bytes": {}},
    {"step": 1, "loss": 1, "elapsed_s": float("inf")}, {"step": -1, "loss": 1}, {"shares": ["x"]}, {"shares": 3},
    {"saved": [], "size_bytes": 1, "took_s": 1}, {"saved": 1, "size_bytes": "x", "took_s": 1}, {"resumed": {}},
    {"peak_gpu_bytes": "x"}, {"skipped": "x", "reason": "y"},
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    TrainOptions(model="mlp").save(tmp_path / "options.json")
    preset("ddp").at(workers=2).save(tmp_path / "plan.json")
    return RunFolder(tmp_path)


def test_only_rows_of_this_program_are_read(folder: RunFolder) -> None:
    lines = [json.dumps(row) for row in [*ODD, *GOOD]]
    odd = ["{", "\0", "[" * 5000, '{"step": ' + "9" * 5000 + "}", "x" * (3 << 20), '{"step": 5, "loss": 1, "count": 1']
    folder.metrics.write_text("\n".join([*odd, *lines, "\udcff"]), errors="surrogateescape")
    assert [json.dumps(row) for row in folder.rows()] == [json.dumps(row) for row in GOOD]
    assert folder.elapsed_s() == 1.0
    history = History.read(folder.path)
    assert [step.step for step in history.steps] == [1, 2, 3, 4]
    assert [event.kind for event in history.events] == ["saved", "shares", "skipped", "skipped"]
    assert [step.loss for step in history.steps] == [2.5, 2.0, None, None]
    assert history.peak_bytes == 7


@pytest.mark.parametrize("row", [*ODD, {"switched": "x"}, {"failed": ["x" * 100_000]}], ids=lambda row: repr(row)[:40])
def test_a_run_with_an_odd_row_is_listed(folder: RunFolder, row: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Any of these was a traceback of `runs` or of the report."""
    folder.metrics.write_text("".join(json.dumps(r) + "\n" for r in [*GOOD[:4], row]))
    runs_command.run([str(folder.path.parent)], as_json=False)
    runs_command.run([str(folder.path), str(folder.path)], as_json=False)
    assert folder.path.name in capsys.readouterr().out
    folder._forget(1)
    assert [r["step"] for r in folder.rows() if "step" in r] == [1]


def test_metrics_that_cannot_be_read_are_not_replaced(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails for a moment must not cost a run that is resumed its metrics."""
    text = "".join(json.dumps(row) + "\n" for row in GOOD)
    folder.metrics.write_text(text)
    take = os.open

    def fail(path: Any, *arguments: Any, **more: Any) -> int:
        if path == folder.metrics:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return take(path, *arguments, **more)

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(InputError, match=r"cannot read .*metrics\.jsonl: Input/output error"):
        folder._forget(1)
    monkeypatch.undo()
    assert folder.metrics.read_text() == text


def test_rows_of_a_few_long_lines_are_found_between_them(folder: RunFolder) -> None:
    good = json.dumps(GOOD[0])
    long = "y" * (1 << 20)
    for parts in ([long, good], [good, long], [long + long, good, long * 3, good], [good, good], [good + "\n" + long]):
        folder.metrics.write_text("\n".join(parts))
        assert len(folder.rows()) == sum(part.startswith("{") for part in parts)
