"""What is kept between runs: for its key, for some days, and never in the way."""

import os
import time
from pathlib import Path

import pytest

from pipedejavu.facts import Machine
from pipedejavu.planner.cache import AGE_S, find, find_or_make, keep, store_folder
from tests.search.case import machine

KEY = {"host": "a", "torch": "2"}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_record_is_found_for_its_key_alone() -> None:
    keep(machine(["fast"]), KEY)
    assert find(Machine, KEY) == machine(["fast"])
    assert find(Machine, {**KEY, "torch": "3"}) is None


def test_a_record_is_made_once_and_again_when_asked() -> None:
    made: list[int] = []

    def make() -> Machine:
        made.append(len(made))
        return machine(["fast"] * len(made))

    assert len(find_or_make(Machine, KEY, make, renews=False).devices) == 1
    assert len(find_or_make(Machine, KEY, make, renews=False).devices) == 1
    assert len(find_or_make(Machine, KEY, make, renews=True).devices) == 2
    assert made == [0, 1]


def test_what_is_old_or_broken_is_not_found() -> None:
    keep(machine(["fast"]), KEY)
    (path,) = store_folder().iterdir()
    old = time.time() - AGE_S - 1
    os.utime(path, (old, old))
    assert find(Machine, KEY) is None
    path.write_text("{")
    assert find(Machine, KEY) is None


def test_a_cache_that_cannot_be_written_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep(machine(["fast"]), KEY)
    assert find(Machine, KEY) is None
