"""Text of others on the terminal: brackets are no markup, and control characters are shown and not obeyed."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from rich.table import Table

from pipedejavu.cli import compare_command, export_command, probe_command, runs_command
from pipedejavu.cli.main import main
from pipedejavu.cli.terminal import print_json, styled, terminal
from pipedejavu.facts import Machine
from pipedejavu.facts.printable import printable, tell
from pipedejavu.plan import preset
from pipedejavu.run import RunFolder, TrainOptions
from pipedejavu.run.live_view import WorkerPanel
from pipedejavu.run.progress import Progress
from tests.facts.test_fuzz import TIMELINE

GLOO = "[/__w/pytorch/third_party/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:2104"
EVIL = "a[/b][red]:smile:\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e"
SHOWN = "a[/b][red]:smile:\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\r\\u202e"


def is_clean(text: str) -> bool:
    return not any((ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160 or c == "\u202e" for c in text)


def made_run(folder: Path, failed: str) -> RunFolder:
    folder.mkdir()
    TrainOptions(model=f"FILE{EVIL}").save(folder / "options.json")
    preset("ddp").at(workers=2).replace(name=f"plan{EVIL}").save(folder / "plan.json")
    run = RunFolder(folder)
    run.add_metrics({"step": 1, "loss": 2.5, "samples": 8, "elapsed_s": 0.5})
    run.add_metrics({"failed": failed})
    return run


def test_control_characters_are_replaced_by_what_they_are() -> None:
    assert printable(EVIL) == SHOWN
    assert printable("a\tb\nc é 漢 … \U0001f600") == "a\tb\nc é 漢 … \U0001f600"
    assert printable("\udcff\0\x7f\u2028\ufeff") == "\\udcff\\x00\\x7f\\u2028\\ufeff"


def test_a_terminal_prints_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(box=None)
    table.add_column(EVIL)
    table.add_row(EVIL)
    terminal(width=200).print(EVIL)
    terminal(width=200).print(table)
    terminal(width=200).print(styled(EVIL, "red"), GLOO)
    found = capsys.readouterr().out
    assert found.count(SHOWN) == 4
    assert GLOO in found
    assert is_clean(found)


@pytest.mark.parametrize("name", ["[/b]", EVIL.replace("/", "|"), "x[red]"])
def test_runs_of_any_name_are_listed_and_set_side_by_side(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "/" in name:
        tmp_path = tmp_path / "["
        tmp_path.mkdir()
        name = "b]"
    made_run(tmp_path / name, f"worker 1: {GLOO}\x1b[2J")
    monkeypatch.setenv("COLUMNS", "400")
    runs_command.run([str(tmp_path)], as_json=False)
    runs_command.run([str(tmp_path / name), str(tmp_path / name)], as_json=False)
    found = capsys.readouterr().out
    assert is_clean(found)
    assert GLOO in found
    assert printable(name) in found
    runs_command.run([str(tmp_path)], as_json=True)
    found = capsys.readouterr().out
    assert is_clean(found)
    assert json.loads(found)["runs"][0]["model"] == f"FILE{EVIL}"


def test_a_finished_run_in_a_folder_of_any_name_ends_with_its_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is called [/b] ended it with a traceback of rich."""
    folder = tmp_path / "[" / "b]\x1b[2J"
    command = "train zoo:mlp --data random:64 --plan preset:ddp --workers 1 --samples 3 --steps 2 --audit --run-dir"
    monkeypatch.setattr(sys, "argv", ["pipedejavu", *command.split(), str(folder)])
    main()
    found = capsys.readouterr()
    assert f"weights in {tmp_path}/[/b]\\x1b[2J/model.safetensors" in found.out
    assert is_clean(found.out)
    assert is_clean(found.err)


@pytest.mark.parametrize(
    "act",
    [
        lambda: runs_command.run([f"no{EVIL}"], as_json=False),
        lambda: export_command.run(f"no{EVIL}", "x", "hugging", None, False),
        lambda: compare_command.compare(f"no{EVIL}", False),
    ],
)
def test_a_fault_of_the_user_is_printed_without_what_would_move_the_cursor(
    act: Callable[[], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipedejavu.cli import main as room

    monkeypatch.setattr(room, "app", lambda **_: act())
    with pytest.raises(SystemExit, match="2"):
        main()
    found = capsys.readouterr().err
    assert f"no{SHOWN}" in found
    assert is_clean(found)


def test_sentences_beside_a_view_and_on_stderr_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(3, "samples", 0.1, panels=[WorkerPanel(EVIL)]) as progress:
        progress.say(EVIL)
        terminal(width=300).print(progress.view)
    tell(f"x{EVIL}\udcff")
    found = capsys.readouterr()
    assert SHOWN in found.out
    assert found.err.splitlines() == [f"pipedejavu: {SHOWN}", f"pipedejavu: x{SHOWN}\\udcff"]


def test_what_is_predicted_and_compared_is_printed_whatever_its_names_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    plan = preset("1f1b").at(workers=2).replace(name=EVIL)
    plan.save(tmp_path / "plan.json")
    monkeypatch.setattr(sys, "argv", ["pipedejavu", "simulate", str(tmp_path / "plan.json"), "--model", "gpt-small"])
    main()
    row: dict[str, Any] = {"lane": ("compute", EVIL), "action": ("F0", "B0")}
    for origin in ("predicted", "measured"):
        TIMELINE.replace(origin=origin, **row).save(tmp_path / f"{origin}.json")
    compare_command.compare(str(tmp_path), as_json=False)
    found = capsys.readouterr()
    assert SHOWN in found.out
    assert is_clean(found.out + found.err)


def test_json_is_one_line_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": EVIL, "b": "é\udcff\u2028"})
    found = capsys.readouterr().out
    assert json.loads(found) == {"a": EVIL, "b": "é\udcff\u2028"}
    assert is_clean(found)
    assert "é" in found


def test_a_machine_is_printed_whatever_its_names_are(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine.from_json(
        json.dumps(
            {
                "name": EVIL,
                "hosts": [{"name": "a", "processor": EVIL}],
                "devices": [{"name": "c", "kind": "e", "type": "cpu", "host": "a", "memory_bytes": 1}],
                "survey": {"date": "x", "time_s": 1, "versions": {"torch": EVIL}, "unknown": [EVIL]},
            }
        )
    )
    probe_command.print_machine(machine)
    found = capsys.readouterr().out
    assert found.count(SHOWN) == 4
    assert is_clean(found)


def test_json_has_null_for_what_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"loss": float("nan"), "bounds": [float("inf"), 1.5], "name": "é\x1b"})
    assert capsys.readouterr().out == '{"loss": null, "bounds": [null, 1.5], "name": "é\\u001b"}\n'
