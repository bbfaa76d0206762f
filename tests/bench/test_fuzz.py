"""A sample of what `bench/fuzz.py` does to every reader, and that it finds what it looks for."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("transformers")

from pipedejavu.facts import InputError
from tests.script import load_script

script = load_script("fuzz")
pytestmark = pytest.mark.filterwarnings("ignore")  # what libraries say of odd files is not ours

FILES = 6


@pytest.mark.parametrize("name", script.KINDS)
def test_changed_files_give_a_value_or_a_sentence(name: str) -> None:
    kind = script.KINDS[name]
    script.read_good(kind)
    for number in range(FILES):
        result, text = script.read_one(kind, number, seed=7, limit_s=60)
        assert result in ("refused", "accepted"), (
            f"python bench/fuzz.py --kinds '{name}' --file {number} --seed 7\n{text}"
        )


def raise_type_error(path: Path) -> None:
    raise TypeError(path)


def wait(_: Path) -> None:
    while True:
        time.sleep(0.01)


def take_memory(_: Path) -> None:
    bytearray(1 << 29)[:: 1 << 12] = b"x" * (1 << 17)


def refuse(path: Path) -> None:
    raise InputError(f"cannot read {path}")


def print_bare(_: Path) -> None:
    print("\x1b[2J")


@pytest.mark.parametrize(
    ("read", "result"),
    [(raise_type_error, "tracebacks"), (wait, "hangs"), (take_memory, "memory"), (refuse, "refused"),
     (print_bare, "tracebacks"), (lambda _: None, "accepted")],
)  # fmt: skip
def test_what_a_reader_does_wrong_is_found(read, result: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "MOST_GROWN_BYTES", 1 << 26)
    kind = script.Kind("any", b"good", read, is_shown=True)
    before = signal.getsignal(signal.SIGALRM)
    assert script.read_one(kind, 0, seed=0, limit_s=0.2)[0] == result
    assert signal.getsignal(signal.SIGALRM) is before


def test_files_change_and_are_the_same_again_for_a_seed(tmp_path: Path) -> None:
    kind, found = script.KINDS["machine"], []
    for number in [*range(200), 0, 1, 2]:
        path = tmp_path / str(len(found))
        script.put(kind, path, random.Random(f"5/{kind.name}/{number}"))
        is_plain = path.is_file() and path.stat().st_size < 1 << 30
        found.append(path.read_bytes() if is_plain else bytes(path.lstat().st_mode))
        if not is_plain and not path.is_dir():
            path.unlink()
    assert found[200:] == found[:3]
    assert len({*found}) > 150
    assert kind.good not in found[:50] or found.count(kind.good) < 5


def test_a_table_counts_what_became_of_each_kind() -> None:
    Outcome = script.Outcome  # noqa: N806
    rows = [Outcome("a", 0, "refused", "", 0.5), Outcome("a", 1, "accepted"), Outcome("b", 0, "hangs", "", 5.0)]
    assert script.table(rows).splitlines() == [
        "| reader | files | refused | accepted | tracebacks | hangs | memory | slowest |",
        "|---|---|---|---|---|---|---|---|",
        "| a | 2 | 1 | 1 | 0 | 0 | 0 | 0.50 s |",
        "| b | 1 | 0 | 0 | 0 | 1 | 0 | 5.00 s |",
        "| all | 3 | 1 | 1 | 0 | 1 | 0 | 5.00 s |",
    ]


def test_a_reader_that_ends_its_process_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "read_good", lambda _: None)
    monkeypatch.setitem(sys.modules, "fuzz", script)  # from which other processes have it
    monkeypatch.setitem(script.KINDS, "any", script.Kind("any", b"good", lambda _: os._exit(3)))
    found = script.run_all(["any", "options"], files=4, seed=0, processes=2)
    assert [(outcome.kind, outcome.result) for outcome in found[:2]] == [("any", "hangs")] * 2
    assert {outcome.result for outcome in found[2:]} <= {"refused", "accepted"}
