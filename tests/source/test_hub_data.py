"""Data sets on the hub: fetched once, and one sentence if that cannot be."""

import sys
from types import ModuleType

import pytest

from pipedejavu.data.data_choice import DataChoice, check_choice
from pipedejavu.facts import InputError
from pipedejavu.source import hub_data
from pipedejavu.source.hub_data import fetch_data

CHOICE = DataChoice(name="hf:someone/texts:test")


class Saved:
    """What the library returns: it writes the folder that `save_to_disk` does."""

    def __init__(self, rows: list[str]):
        self.rows = rows

    def save_to_disk(self, path: str) -> None:
        pyarrow = pytest.importorskip("pyarrow")
        from pathlib import Path

        folder = Path(path)
        folder.mkdir()
        for name in ("state.json", "dataset_info.json"):
            (folder / name).write_text("{}")
        table = pyarrow.table({"text": self.rows})
        with pyarrow.ipc.new_stream(str(folder / "data-00000.arrow"), table.schema) as stream:
            stream.write_table(table)


@pytest.fixture
def asked(monkeypatch, tmp_path) -> list[tuple[str, str]]:
    """What was fetched from a hub that answers."""
    calls: list[tuple[str, str]] = []
    library = ModuleType("datasets")

    def load_dataset(name: str, split: str) -> Saved:
        calls.append((name, split))
        if name == "nobody/nothing":
            raise RuntimeError("there is no such data set\nmore")
        return Saved(["one two three " * 20, "four five " * 20])

    library.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", library)
    monkeypatch.setattr(hub_data, "is_reachable", lambda: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return calls


def test_a_data_set_is_fetched_once_and_read_like_a_saved_folder(asked) -> None:
    from pipedejavu.data.data_files import find_files

    for _ in range(2):
        fetch_data(CHOICE)
        check_choice(CHOICE)
    assert asked == [("someone/texts", "test")]
    assert CHOICE.path is not None
    assert find_files(CHOICE.path).kind == "arrow"
    fetch_data(DataChoice(evaluation="hf:plain"))
    assert asked[1:] == [("plain", "train")]


def test_a_data_set_that_cannot_be_read_leaves_nothing(asked, tmp_path) -> None:
    with pytest.raises(InputError, match=r"^cannot read the data set 'nobody/nothing': there is no such data set$"):
        fetch_data(DataChoice(name="hf:nobody/nothing"))
    assert not [*(tmp_path / "cache").rglob("*.*")]


def test_without_a_network_or_the_library_it_says_so(asked, monkeypatch) -> None:
    monkeypatch.setattr(hub_data, "is_reachable", lambda: False)
    with pytest.raises(InputError, match="the hub does not answer, and the cache does not hold it"):
        fetch_data(CHOICE)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="needs `datasets`; pip install datasets"):
        fetch_data(CHOICE)
    assert not asked
