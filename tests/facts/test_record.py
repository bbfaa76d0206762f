import errno
import os
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, ValidationError

from pipedejavu.facts import Bytes, FaultsError, InputError, Machine, Profile, Record, Timeline, nearest, read_file
from pipedejavu.facts.error import brief, repeated


class Leaf(Record):
    size_bytes: Bytes = 0
    colour: Literal["red", "green"] = "red"
    wide: int | None = Field(default=None, alias="width")


class Tree(Record):
    name: str
    leaf: Leaf = Leaf()
    maybe: Leaf | None = None
    row: tuple[Leaf, ...] = ()
    pair: tuple[Leaf, ...] = Field(default=(Leaf(), Leaf()), min_length=2)
    by_name: dict[str, Leaf] = Field(default_factory=dict)
    maybe_row: tuple[Leaf, ...] | None = None
    deep: dict[str, tuple[Leaf, ...]] = Field(default_factory=dict)


def faults_of(record: type[Record], text: str | bytes) -> list[str]:
    with pytest.raises(FaultsError) as caught:
        record.from_json(text)
    return list(caught.value.faults)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"name":"t","leav":{}}', "unknown key 'leav'; did you mean 'leaf'?"),
        ('{"name":"t","leaf":{"color":"red"}}', "unknown key 'leaf.color'; did you mean 'colour'?"),
        ('{"name":"t","maybe":{"size":1}}', "unknown key 'maybe.size'; did you mean 'size_bytes'?"),
        ('{"name":"t","row":[{},{"size":1}]}', "unknown key 'row[1].size'; did you mean 'size_bytes'?"),
        ('{"name":"t","by_name":{"a":{"size":1}}}', "unknown key 'by_name.a.size'; did you mean 'size_bytes'?"),
        # A key of the dict that is also the name of a field.
        ('{"name":"t","by_name":{"leaf":{"size":1}}}', "unknown key 'by_name.leaf.size'; did you mean 'size_bytes'?"),
        ('{"name":"t","maybe_row":[{"size":1}]}', "unknown key 'maybe_row[0].size'; did you mean 'size_bytes'?"),
        ('{"name":"t","deep":{"x":[{"size":1}]}}', "unknown key 'deep.x[0].size'; did you mean 'size_bytes'?"),
        # A field is known by the name that it has in the file.
        ('{"name":"t","leaf":{"wid":1}}', "unknown key 'leaf.wid'; did you mean 'width'?"),
        ('{"name":"t","leaf":{"wide":1}}', "unknown key 'leaf.wide'; did you mean 'width'?"),
        ('{"name":"t","leaf":{"zzz":1}}', "unknown key 'leaf.zzz'; known: size_bytes, colour, width"),
        ('{"name":"t","NAME":"u"}', "unknown key 'NAME'; did you mean 'name'?"),
    ],
)
def test_an_unknown_key_comes_with_the_nearest_name(text: str, fault: str) -> None:
    assert faults_of(Tree, text) == [fault]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{}", "missing key 'name'"),
        ('{"name":5}', "name: Input should be a valid string, found 5"),
        ('{"name":null}', "name: Input should be a valid string, found None"),
        ('{"name":"t","row":{}}', "row: Input should be a valid array, found {}"),
        ('{"name":"t","leaf":[]}', "leaf: Input should be an object, found []"),
        ('{"name":"t","leaf":{"width":1.5}}', "leaf.width: Input should be a valid integer, found 1.5"),
        (
            '{"name":"t","leaf":{"colour":"gren"}}',
            "leaf.colour: 'gren' is not one of its values; did you mean 'green'?",
        ),
        ('{"name":"t","leaf":{"colour":7}}', "leaf.colour: 7 is not one of its values; known: red, green"),
        ('{"name":"t","pair":[{}]}', "pair: Tuple should have at least 2 items after validation, not 1, found [{}]"),
        ("[]", "Input should be an object, found []"),
        ("null", "Input should be an object, found None"),
        ('"name"', "Input should be an object, found 'name'"),
        ("5", "Input should be an object, found 5"),
    ],
)
def test_one_fault_of_a_text(text: str, fault: str) -> None:
    assert faults_of(Tree, text) == [fault]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "EOF while parsing a value at line 1 column 0"),
        ("{", "EOF while parsing an object"),
        ('{"name":"t"} x', "trailing characters"),
        ("{'name':'t'}", "key must be a string at line 1 column 2"),
        (b'{"name":"\xff"}', "invalid unicode"),
        (b"\xff\xfe{\x00", "expected value"),
        ('{"name":"\\ud800"}', "unexpected end of hex escape"),
        ("[" * 100_000, "recursion limit"),
        ('{"name":' * 5000, "recursion limit"),
        ('{"name":"t","leaf":{"width":1' + "0" * 5000 + "}}", "number out of range"),
    ],
)
def test_a_text_that_is_no_json(text: str | bytes, reason: str) -> None:
    (fault,) = faults_of(Tree, text)
    assert fault.startswith(f"not valid JSON: {reason}")


def test_text_that_is_no_unicode() -> None:
    (fault,) = faults_of(Tree, '{"name":"\ud800"}')
    assert fault.startswith("Input should be a valid string, unable to parse raw data as a unicode string, found ")


def test_an_item_with_faults_does_not_make_its_row_too_short() -> None:
    assert faults_of(Tree, '{"name":"t","pair":[{"width":"x"},{}]}') == [
        "pair[0].width: Input should be a valid integer, found 'x'"
    ]


def test_all_faults_stand_in_one_message() -> None:
    text = """{"naem": "t", "leaf": {"size_bytes": "1 s", "colour": "blue"},
               "row": [{"size_bytes": -1}, {"x": 1, "x": 2}]}"""
    with pytest.raises(FaultsError) as caught:
        Tree.from_json(text, source="tree.json")
    assert str(caught.value) == (
        "tree.json has 7 faults:\n"
        "  - missing key 'name'\n"
        "  - leaf.size_bytes: '1 s' is in seconds; this needs bytes (B)\n"
        "  - leaf.colour: 'blue' is not one of its values; known: red, green\n"
        "  - row[0].size_bytes: -1 B is not possible; it must be zero or more, and finite\n"
        "  - unknown key 'row[1].x'; known: size_bytes, colour, width\n"
        "  - unknown key 'naem'; did you mean 'name'?\n"
        "  - key 'x' is given twice"
    )


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ('{"name":"a","name":"b"}', ["name"]),
        ('{"name":"a","leaf":{"width":1,"width":1}}', ["width"]),
        ('{"name":"a","by_name":{"x":{},"x":{},"x":{}}}', ["x"]),
        ('{"name":"a","name":"b","row":[{"width":1,"width":2}]}', ["width", "name"]),
    ],
)
def test_a_key_given_twice_is_a_fault(text: str, keys: list[str]) -> None:
    assert faults_of(Tree, text) == [f"key '{key}' is given twice" for key in keys]


def test_a_long_value_is_cut_in_the_message() -> None:
    (fault,) = faults_of(Tree, '{"name":"t","leaf":[' + "1," * 100_000 + "1]}")
    assert fault == f"leaf: Input should be an object, found [{'1, ' * 26}…"


MACHINE = """{"name": "m", "hosts": [{"name": "node"}],
 "devices": [{"name": "gpu0", "kind": "h", "type": "gpu", "host": "nod", "memory_bytes": -5}],
 "links": [{"source": "gup0", "bytes_per_s": "5 GB", "latncy_s": 0}]}"""


def test_faults_of_fields_and_between_fields_stand_in_one_message() -> None:
    with pytest.raises(FaultsError) as caught:
        Machine.from_json(MACHINE, source="m.json")
    assert str(caught.value) == (
        "m.json has 5 faults:\n"
        "  - devices[0].memory_bytes: -5 B is not possible; it must be zero or more, and finite\n"
        "  - links[0].bytes_per_s: '5 GB' is in bytes; this needs bytes per second (B/s)\n"
        "  - unknown key 'links[0].latncy_s'; did you mean 'latency_s'?\n"
        "  - device 'gpu0' is on host 'nod', which is missing; did you mean 'node'?\n"
        "  - links[0].source 'gup0' matches no device; did you mean 'gpu0'?"
    )


class Forest(Record):
    by_name: dict[str, Tree]
    oldest: str = "oak"

    def disagreements(self) -> list[str]:
        wrong = [key for key, tree in self.by_name.items() if tree.name != key]
        missing = [] if self.oldest in self.by_name else [f"there is no '{self.oldest}'"]
        return [f"'{key}' is called otherwise" for key in wrong] + missing


def test_records_in_a_dict_are_compared_beside_other_faults() -> None:
    assert faults_of(Forest, '{"by_name":{"elm":{"name":"fir","leaf":{"size_bytes":-1}}}}') == [
        "by_name.elm.leaf.size_bytes: -1 B is not possible; it must be zero or more, and finite",
        "'elm' is called otherwise",
        "there is no 'oak'",
    ]


@pytest.mark.parametrize(
    "text",
    [
        '{"name":"m","hosts":"node","devices":[{"name":"d","kind":"k","type":"cpu","host":"x","memory_bytes":1}]}',
        '{"name":"m","hosts":[{"name":"h"}],"devices":[{"nam":"d","kind":"k","type":"cpu","host":"x","memory_bytes":1}]}',
        '{"name":"m","hosts":[{"name":"h"}],"devices":[5]}',
        '{"name":"m","hosts":[{"name":{}}],"devices":[{"name":"d","kind":"k","type":"cpu","host":"x","memory_bytes":1}]}',
    ],
)
def test_faults_that_hide_names_are_reported_alone(text: str) -> None:
    assert not [fault for fault in faults_of(Machine, text) if "missing;" in fault or "matches" in fault]


def test_a_fault_between_fields_is_told_once() -> None:
    text = '{"name":"p","units":[{"name":"a"},{"name":"a"}]}'
    assert faults_of(Profile, text) == ["two units are called 'a'"]


def test_the_subject_is_the_source_or_the_record() -> None:
    with pytest.raises(FaultsError, match=r"^tree: missing key 'name'$"):
        Tree.from_json("{}")
    with pytest.raises(FaultsError, match=r"^my\.json: missing key 'name'$"):
        Tree.from_json("{}", source="my.json")


def test_a_record_is_frozen_and_keyword_only() -> None:
    tree = Tree(name="t")
    with pytest.raises(ValidationError, match="frozen"):
        tree.name = "u"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Tree("t")  # type: ignore[call-arg]


def test_but_changes_a_copy_and_checks_it() -> None:
    tree = Tree(name="t")
    assert tree.replace(name="u").name == "u"
    assert tree.name == "t"
    with pytest.raises(ValidationError, match="valid string"):
        tree.replace(name=5)
    with pytest.raises(ValidationError, match="Extra inputs"):
        tree.replace(nam="u")
    assert Leaf(width=3).replace(size_bytes=1) == Leaf(width=3, size_bytes=1)


def test_json_leaves_defaults_out_and_uses_the_names_of_the_file() -> None:
    assert Tree(name="t").to_json(indent=None) == '{"name":"t"}'
    assert Leaf(width=3).to_json(indent=None) == '{"width":3}'
    assert Leaf.from_json('{"width":3}').wide == 3


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    tree = Tree(name="ünï\n", row=(Leaf(size_bytes=5), Leaf()))
    tree.save(path)
    assert Tree.load(path) == tree
    assert Tree.load(str(path)) == tree
    assert path.read_text(encoding="utf-8").endswith("}\n")
    Tree(name="other").save(str(path))
    assert Tree.load(path).name == "other"
    assert [p.name for p in tmp_path.iterdir()] == ["tree.json"]


def test_load_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    path.touch()
    with pytest.raises(FaultsError) as caught:
        Tree.load(path)
    assert str(caught.value) == f"{path}: not valid JSON: EOF while parsing a value at line 1 column 0"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        Tree.load(tmp_path / "none.json")
    assert str(caught.value) == f"cannot read {tmp_path}/none.json: No such file or directory"
    with pytest.raises(InputError) as caught:
        read_file(tmp_path)
    assert str(caught.value) == f"cannot read {tmp_path}: Is a directory"


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path, reason in [
        (tmp_path / "none" / "t.json", "No such file or directory"),
        (tmp_path / "file" / "t.json", "Not a directory"),
        (tmp_path / "folder", "Is a directory"),
    ]:
        with pytest.raises(InputError) as caught:
            Tree(name="t").save(path)
        assert str(caught.value) == f"cannot write {path}: {reason}"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match=r"^cannot write .*t\.json: Permission denied$"):
        Tree(name="t").save(tmp_path / "t.json")


def test_the_current_folder_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"^cannot write \.: "):
        Tree(name="t").save(".")
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_midway_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tree.json"
    Tree(name="old").save(path)

    write = os.write

    def fill(file: int, data: memoryview) -> int:
        write(file, data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", fill)
    with pytest.raises(InputError) as caught:
        Tree(name="new").save(path)
    assert str(caught.value) == f"cannot write {path}: No space left on device"
    assert [p.name for p in tmp_path.iterdir()] == ["tree.json"]
    assert Tree.load(path).name == "old"


@pytest.mark.parametrize(
    ("name", "known", "text"),
    [
        ("gpip", ["gpipe", "1f1b"], "; did you mean 'gpipe'?"),
        ("DDP", ["gpipe", "ddp"], "; did you mean 'ddp'?"),
        ("zzz", ["gpipe", "ddp"], "; known: gpipe, ddp"),
        ("zzz", [], ""),
        ("zzz", [str(i) for i in range(60)], "; known: " + ", ".join(map(str, range(60)))),
        ("zzz", [str(i) for i in range(75)], "; known: " + ", ".join(map(str, range(60))) + " and 15 more"),
    ],
)
def test_nearest(name: str, known: list[str], text: str) -> None:
    assert nearest(name, known) == text


def test_repeated_names_come_once_in_order() -> None:
    assert repeated(["b", "a", "b", "c", "a", "b"]) == ["b", "a"]


def test_brief_keeps_short_values_whole() -> None:
    assert brief("x" * 78) == "'" + "x" * 78 + "'"
    assert brief("x" * 79) == "'" + "x" * 78 + "…"
    assert len(brief("x" * 79)) == 80


def test_one_fault_needs_no_list() -> None:
    assert str(FaultsError("it", ["is wrong"])) == "it: is wrong"
    assert str(FaultsError("it", ["a", "b"])) == "it has 2 faults:\n  - a\n  - b"
    assert isinstance(FaultsError("it", ["a"]), InputError)


def test_columns_of_unequal_length_are_told_beside_other_faults() -> None:
    text = (
        '{"origin":"predicted","makespan_s":-1,"bubble_fraction":0,"workers":[],'
        '"worker":[0],"lane":[],"action":[],"start_s":[],"end_s":[]}'
    )
    assert faults_of(Timeline, text) == [
        "makespan_s: -1 s is not possible; it must be zero or more, and finite",
        "the columns differ in length: worker 1, lane 0, action 0, start_s 0, end_s 0",
    ]


def test_an_integer_that_no_float_can_hold_is_refused() -> None:
    said = "the number 99999999… has 400 digits; at most 300 are read"
    assert faults_of(Tree, f'{{"name": "t", "leaf": {{"width": {"9" * 400}}}}}') == [said]
