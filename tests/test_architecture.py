"""The rooms of the package: who may import whom, what stays free of torch, and how files look.

The table below is the one of the architecture; change both together. Every check reads the source alone, so that
imports inside functions count too, and every fault says what to change.
"""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

LEVELS = {
    "facts": 0,
    "plan": 1,
    "program": 2,
    "analysis": 3,
    "runtime": 2,
    "optim": 3,
    "simulate": 4,
    "probe": 4,
    "profile": 4,
    "engine": 4,
    "hybrid": 4,
    "store": 4,
    "one_device": 5,
    "search": 5,
    "report": 5,
    "graph_data": 4,
    "zoo": 5,
    "cluster": 6,
    "data": 6,
    "health": 6,
    "run": 6,
    "hybrid_report": 6,
    "source": 7,
    "job_queue": 7,
    "model_check": 8,
    "planner": 8,
    "session": 9,
    "launch": 10,
    "reproduce": 11,
    "cli": 12,
}
"""Rooms by their level; a room that does not exist yet has its level already."""
WITHOUT_TORCH = ("facts", "plan", "program", "analysis", "simulate", "search", "report", "cluster")
TORCH = ("torch", "torchvision", "transformers", "accelerate")
ONLY_IN_CLI = ("typer", "click")
ROOT = ("", "__main__")
"""Above all rooms: the public names, and the door of `python -m`."""
MOST_LINES = 400
MOST_COMPLEX = 20
"""Branches of a function, after McCabe."""
SHARED_STEMS: dict[str, str] = {}
"""File stems that two rooms may have, each with the reason."""
SHARED_CLASSES: dict[str, str] = {}
"""Public class names that two rooms may have, each with the reason."""
BANNED = ("utils", "util", "helpers", "helper", "common", "misc", "manager")

PACKAGE = Path(__file__).parents[1] / "src" / "pipedejavu"


class Module(NamedTuple):
    """One file of the package: its name inside it ('plan.axis', 'plan' for a room's __init__, '' for the root's)."""

    name: str
    path: Path
    tree: ast.Module
    imports: frozenset[str]
    """Other modules of the package, by name."""
    outside: frozenset[str]
    """Top names of everything else that is imported."""

    @property
    def room(self) -> str:
        return self.name.partition(".")[0]


def read_modules(package: Path) -> dict[str, Module]:
    paths = {".".join(_parts(package, path)): path for path in sorted(package.rglob("*.py"))}
    modules = {}
    for name, path in paths.items():
        tree = ast.parse(path.read_text("utf-8"))
        imports, outside = set(), set()
        for target in _targets(tree, name, path.name == "__init__.py", package.name):
            top, _, rest = target.partition(".")
            if top != package.name:
                outside.add(top)
                continue
            while rest and rest not in paths:  # the name of something in a module, not of a module
                rest = rest.rpartition(".")[0]
            imports.add(rest)
        modules[name] = Module(name, path.relative_to(package), tree, frozenset(imports), frozenset(outside))
    return modules


def _parts(package: Path, path: Path) -> list[str]:
    parts = list(path.relative_to(package).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def _targets(tree: ast.Module, name: str, is_package: bool, package: str) -> Iterator[str]:
    """Yields the absolute name of everything that a file imports, inside functions too."""
    here = [package, *name.split(".")] if name else [package]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = node.level - is_package
            base = ".".join(here[: len(here) - up]) if node.level else ""
            start = ".".join(part for part in (base, node.module) if part)
            yield from (f"{start}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str))


def room_faults(modules: dict[str, Module]) -> list[str]:
    faults = []
    for module in modules.values():
        if module.room not in (*LEVELS, *ROOT):
            faults.append(
                f"{module.path} is in no room; move it to one of {', '.join(LEVELS)}, or add a room to LEVELS"
            )
        elif module.room not in modules:
            faults.append(f"{module.path} is in a folder without __init__.py; add one with a docstring")
    return faults


def order_faults(modules: dict[str, Module]) -> list[str]:
    faults = []
    for module in modules.values():
        for target in sorted(module.imports - {module.name}) if module.room in LEVELS else ():
            room = target.partition(".")[0]
            if not room:
                faults.append(f"{module.path} imports from the root package, which is above all rooms; import the room")
            elif room != module.room and room in LEVELS and LEVELS[room] >= LEVELS[module.room]:
                where = "beside" if LEVELS[room] == LEVELS[module.room] else "above"
                faults.append(
                    f"{module.path} imports '{target}', but room '{room}' (level {LEVELS[room]}) is {where} room"
                    f" '{module.room}' (level {LEVELS[module.room]});"
                    " move what both need to a lower room, or pass it in"
                )
    return faults


def torch_faults(modules: dict[str, Module]) -> list[str]:
    faults = []
    for module in modules.values():
        if module.room not in WITHOUT_TORCH:
            continue
        way = _way_to_torch(module, modules)
        if way:
            faults.append(
                f"{module.path} imports {' → '.join(way)}, but room '{module.room}' works without torch; move that to"
                " probe, profile, engine or a room above them"
            )
    return faults


def _way_to_torch(start: Module, modules: dict[str, Module]) -> list[str]:
    """Returns the shortest chain of imports from a module to torch, or nothing."""
    ways: dict[str, list[str]] = {start.name: []}
    queue = [start.name]
    for name in queue:
        found = sorted(modules[name].outside & set(TORCH))
        if found:
            return [*ways[name], found[0]]
        for target in sorted(modules[name].imports):
            parts = target.split(".")
            for step in (".".join(parts[: n + 1]) for n in range(len(parts))):  # a module's packages are run first
                if step in modules and step and step not in ways:
                    ways[step] = [*ways[name], step]
                    queue.append(step)
    return []


def cycle_faults(modules: dict[str, Module]) -> list[str]:
    faults = []
    for room in sorted({module.room for module in modules.values()} - {""}):
        inside = {name: module for name, module in modules.items() if module.room == room}
        try:
            TopologicalSorter({name: sorted(m.imports & inside.keys()) for name, m in inside.items()}).prepare()
        except CycleError as error:
            names = " → ".join(reversed(error.args[1]))
            faults.append(f"room '{room}' has an import cycle, {names}; move what both need to a file below them")
    return faults


def command_line_faults(modules: dict[str, Module]) -> list[str]:
    return [
        f"{module.path} imports {name}, which only room 'cli' may; return values or raise InputError instead"
        for module in modules.values()
        for name in sorted(module.outside & set(ONLY_IN_CLI))
        if module.room != "cli"
    ]


def file_faults(modules: dict[str, Module], package: Path) -> list[str]:
    faults = []
    for module in modules.values():
        if not ast.get_docstring(module.tree):
            faults.append(f"{module.path} has no docstring; open it with what it owns and what it does not know")
        lines = len((package / module.path).read_text("utf-8").splitlines())
        if lines > MOST_LINES:
            faults.append(f"{module.path} has {lines} lines; divide it by nouns into files of at most {MOST_LINES}")
        classes = [node.name for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
        for name in [*module.name.split(".")[-1:], *classes]:
            banned = [word for word in _words(name) if word in BANNED]
            faults += [f"{module.path}: '{name}' says '{word}', which is no noun; name what it is" for word in banned]
    return faults


KIND_LETTERS = frozenset("FBIWR" + "xgswdonbpcet")
"""The printed forms of actions and values that have one letter."""


def letter_faults(modules: dict[str, Module]) -> list[str]:
    """Finds comparisons with the letter of an action or value, which only room 'program' reads and prints."""
    return [
        f"{module.path}:{line} compares a kind with '{letters}'; use ActionKind or ValueKind"
        for module in modules.values()
        if module.room != "program"
        for line, letters in _letter_comparisons(module.tree)
    ]


def _letter_comparisons(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            is_in = isinstance(node.ops[0], ast.In | ast.NotIn)
            if any(map(_is_kind, sides)):
                yield from ((node.lineno, letters) for side in sides for letters in _letters(side, is_in=is_in))
        elif isinstance(node, ast.Match) and _is_kind(node.subject):
            values = [part.value for case in node.cases for part in ast.walk(case) if isinstance(part, ast.MatchValue)]
            yield from ((value.lineno, letters) for value in values for letters in _letters(value))


def _is_kind(node: ast.expr) -> bool:
    """Whether an expression reads the kind of an action or value: `a.kind`, `what`, `value[0]`."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == 0
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in ("kind", "what")


def _letters(node: ast.expr, *, is_in: bool = False) -> list[str]:
    """Returns the letters of kinds in an expression: one as a string, several in a string after `in`, or a list."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return [letters for element in node.elts for letters in _letters(element)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and (is_in or len(node.value) == 1):
        return [node.value] if set(node.value) <= KIND_LETTERS else []
    return []


def name_faults(modules: dict[str, Module]) -> list[str]:
    """Returns file stems and public class names that mean something else in another room, or in another file."""
    stems: dict[str, set[str]] = defaultdict(set)
    classes: dict[str, set[str]] = defaultdict(set)
    files: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module in modules.values():
        _, _, stem = module.name.rpartition(".")
        if "." in module.name and stem not in SHARED_STEMS:
            stems[stem].add(module.room)
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and node.name[0] != "_" and node.name not in SHARED_CLASSES:
                classes[node.name].add(module.room)
                files[module.room, node.name].append(str(module.path))
    found = [(f"file stem '{name}'", rooms) for name, rooms in sorted(stems.items())]
    found += [(f"class name '{name}'", rooms) for name, rooms in sorted(classes.items())]
    return [
        f"{name} is in rooms {' and '.join(sorted(rooms))}; name each after what it is in its room"
        for name, rooms in found
        if len(rooms) > 1
    ] + [
        f"class name '{name}' is in {' and '.join(sorted(paths))}; name each after what it is in its file"
        for (_, name), paths in sorted(files.items())
        if len(paths) > 1
    ]


def complexity_faults(modules: dict[str, Module]) -> list[str]:
    faults = []
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and complexity(node) > MOST_COMPLEX:
                faults.append(
                    f"{module.path}:{node.lineno}: {node.name} has a complexity of {complexity(node)};"
                    f" divide it into functions of at most {MOST_COMPLEX}"
                )
    return faults


def complexity(function: ast.AST) -> int:
    """Counts the ways through a function after McCabe, those of the functions inside it included."""
    loops = ast.For, ast.AsyncFor, ast.While, ast.comprehension
    branches = *loops, ast.If, ast.IfExp, ast.ExceptHandler, ast.match_case
    count = 1
    for node in ast.walk(function):
        count += isinstance(node, branches)
        count += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        count += len(node.ifs) if isinstance(node, ast.comprehension) else 0
    return count


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)]


def all_faults(package: Path) -> list[str]:
    modules = read_modules(package)
    checks = (
        room_faults, order_faults, torch_faults, cycle_faults, command_line_faults, letter_faults, name_faults,
        complexity_faults,
    )  # fmt: skip
    return [fault for check in checks for fault in check(modules)] + file_faults(modules, package)


def test_the_package_keeps_to_its_rooms() -> None:
    faults = all_faults(PACKAGE)
    assert not faults, "\n" + "\n".join(faults)


def test_the_checks_see_the_package() -> None:
    modules = read_modules(PACKAGE)
    assert {"", "facts", "facts.record", "plan.axis", "program.compiler", "simulate.clock"} <= modules.keys()
    assert {"facts"} <= modules["plan.axis"].imports
    assert "pydantic" in modules["facts.record"].outside
    assert "facts.record" in modules["facts"].imports


WITHOUT = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {torch}:
            raise ModuleNotFoundError(f"import of {{name}} was tried", name=name)

sys.meta_path.insert(0, Refuse())
for room in {rooms}:
    package = importlib.import_module(f"pipedejavu.{{room}}")
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
print("pipedejavu.facts" in sys.modules)
"""


@pytest.mark.parametrize(
    "rooms",
    [
        pytest.param(WITHOUT_TORCH, id="rooms without torch"),
        pytest.param(("cli",), id="the command line, which plans where torch is not installed"),
    ],
)
def test_rooms_load_where_torch_is_not_installed(rooms: tuple[str, ...]) -> None:
    here = [room for room in rooms if (PACKAGE / room / "__init__.py").exists()]
    code = WITHOUT.format(rooms=here, torch=TORCH)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"import torch inside the function that needs it, or in another room:\n{done.stderr}"
    assert done.stdout == "True\n"


# The checks can fail: small trees, each with one fault.

SOUND = {
    "__init__.py": "",
    "facts/__init__.py": "from pipedejavu.facts.record import Record",
    "facts/record.py": "class Record: ...",
    "plan/__init__.py": "from pipedejavu.facts import Record",
    "plan/axis.py": "from pipedejavu.plan.word import word\nfrom pipedejavu import facts",
    "plan/word.py": "import pydantic\nword = 1",
    "engine/__init__.py": "import torch",
    "launch/__init__.py": "from pipedejavu import engine",
    "cli/__init__.py": "import typer\ndef main():\n    from pipedejavu.launch import x",
}


def faults_of(folder: Path, **files: str) -> list[str]:
    package = folder / "pipedejavu"
    changed = {path.replace("__", "/", 1) + ".py": text for path, text in files.items()}
    for path, text in {**SOUND, **changed}.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(f'"""What it is."""\n{text}\n', encoding="utf-8")
    return all_faults(package)


def test_a_sound_tree_has_no_faults(tmp_path: Path) -> None:
    assert faults_of(tmp_path) == []


@pytest.mark.parametrize(
    "text",
    [
        "from pipedejavu.plan import Plan",
        "import pipedejavu.plan",
        "from pipedejavu import plan",
        "from ..plan import Plan",
        "from .. import plan",
        "def f():\n    from pipedejavu.plan import Plan",
        "if TYPE_CHECKING:\n    import pipedejavu.plan as p",
        "importlib.import_module('pipedejavu.plan')",
    ],
)
def test_an_import_upwards_is_found(text: str, tmp_path: Path) -> None:
    assert faults_of(tmp_path, facts__machine=text) == [
        "facts/machine.py imports 'plan', but room 'plan' (level 1) is above room 'facts' (level 0);"
        " move what both need to a lower room, or pass it in"
    ]


def test_an_import_of_a_room_beside_is_found(tmp_path: Path) -> None:
    text = "from pipedejavu.engine import run"
    assert faults_of(tmp_path, probe____init__="", probe__shape=text) == [
        "probe/shape.py imports 'engine', but room 'engine' (level 4) is beside room 'probe' (level 4);"
        " move what both need to a lower room, or pass it in"
    ]


def test_an_import_from_the_root_is_found(tmp_path: Path) -> None:
    assert faults_of(tmp_path, plan__more="from pipedejavu import Trainer") == [
        "plan/more.py imports from the root package, which is above all rooms; import the room"
    ]


@pytest.mark.parametrize("text", ["import torch.nn as nn", "from torch import nn", "def f():\n    import torch"])
def test_torch_in_a_room_without_it_is_found(text: str, tmp_path: Path) -> None:
    assert faults_of(tmp_path, plan__more=text) == [
        "plan/more.py imports torch, but room 'plan' works without torch;"
        " move that to probe, profile, engine or a room above them"
    ]


def test_torch_by_way_of_another_room_is_found(tmp_path: Path) -> None:
    files = {"profile____init__": "import torch", "profile__unit": "", "search____init__": ""}
    assert faults_of(tmp_path, **files, search__beam="from pipedejavu.profile.unit import unit") == [
        "search/beam.py imports profile → torch, but room 'search' works without torch;"
        " move that to probe, profile, engine or a room above them"
    ]


def test_a_cycle_is_found(tmp_path: Path) -> None:
    one, two = "from pipedejavu.plan.two import x", "def f():\n    from .one import x"
    (fault,) = faults_of(tmp_path, plan__one=one, plan__two=two)
    assert fault in {
        f"room 'plan' has an import cycle, {a} → {b} → {a}; move what both need to a file below them"
        for a, b in [("plan.one", "plan.two"), ("plan.two", "plan.one")]
    }


def test_a_file_that_imports_its_own_room_is_a_cycle(tmp_path: Path) -> None:
    (fault,) = faults_of(tmp_path, facts__record="from pipedejavu.facts import Record")
    assert fault.startswith("room 'facts' has an import cycle, facts")


def test_the_command_line_elsewhere_is_found(tmp_path: Path) -> None:
    assert faults_of(tmp_path, plan__more="def f():\n    import typer") == [
        "plan/more.py imports typer, which only room 'cli' may; return values or raise InputError instead"
    ]


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("x = a.kind == 'F'", "F"),
        ("x = [v for v in y if v[0] != 'w']", "w"),
        ("x = what in 'wo'", "wo"),
        ("x = a.kind not in ('SEND', 'W')", "W"),
        ("match a.what:\n    case 'SEND' | 'd':\n        x = 1", "d"),
    ],
)
def test_the_letter_of_a_kind_is_found(text: str, letters: str, tmp_path: Path) -> None:
    (fault,) = faults_of(tmp_path, engine__more=text)
    assert fault.startswith("engine/more.py:")
    assert fault.endswith(f" compares a kind with '{letters}'; use ActionKind or ValueKind")


@pytest.mark.parametrize(
    "text", ["x = a.kind == ActionKind.FORWARD", "x = row.unit == 's'", "x = feed.kind == 'own'", "x = {'F': 1}"]
)
def test_other_comparisons_are_no_fault(text: str, tmp_path: Path) -> None:
    assert faults_of(tmp_path, engine__more=text) == []


def test_letters_are_compared_inside_of_program(tmp_path: Path) -> None:
    assert faults_of(tmp_path, program____init__="", program__more="x = a.kind == 'F'") == []


@pytest.mark.parametrize("path", ["tools__x", "stray"])
def test_a_file_in_no_room_is_found(path: str, tmp_path: Path) -> None:
    (fault,) = faults_of(tmp_path, **{path: ""})
    assert fault.startswith(f"{path.replace('__', '/')}.py is in no room; move it to one of facts, plan, program")


def test_a_room_without_init_is_found(tmp_path: Path) -> None:
    assert faults_of(tmp_path, zoo__shape="") == [
        "zoo/shape.py is in a folder without __init__.py; add one with a docstring"
    ]


@pytest.mark.parametrize(
    ("path", "text", "fault"),
    [
        ("plan__utils", "", "plan/utils.py: 'utils' says 'utils', which is no noun; name what it is"),
        ("plan__io_helpers", "", "plan/io_helpers.py: 'io_helpers' says 'helpers', which is no noun; name what it is"),
        ("plan__x", "class IOManager: ...", "plan/x.py: 'IOManager' says 'manager', which is no noun; name what it is"),
        ("plan__x", "x = 1\n" * 400, "plan/x.py has 402 lines; divide it by nouns into files of at most 400"),
    ],
)
def test_a_file_out_of_form_is_found(path: str, text: str, fault: str, tmp_path: Path) -> None:
    assert faults_of(tmp_path, **{path: text}) == [fault]


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"facts__word": ""}, "file stem 'word' is in rooms facts and plan; name each after what it is in its room"),
        (
            {"plan__more": "class Record: ..."},
            "class name 'Record' is in rooms facts and plan; name each after what it is in its room",
        ),
        ({"plan__more": "class _Record: ..."}, None),
        (
            {"plan__word": "class Word: ...", "plan__more": "class Word: ..."},
            "class name 'Word' is in plan/more.py and plan/word.py; name each after what it is in its file",
        ),
    ],
)
def test_a_name_that_two_rooms_have_is_found(files: dict[str, str], fault: str | None, tmp_path: Path) -> None:
    assert faults_of(tmp_path, **files) == ([fault] if fault else [])


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("pass", 1),
        ("if a and b or c: pass", 4),
        ("return [x if x else y for x in a if x for y in b]", 5),
        ("for x in a:\n        try: pass\n        except E: pass\n    while x: pass", 4),
        ("match x:\n        case 1: pass\n        case 2: pass", 3),
        ("def g():\n        return a or b", 2),
    ],
)
def test_complexity_counts_the_ways_through_a_function(text: str, count: int) -> None:
    assert complexity(ast.parse(f"def f():\n    {text}")) == count


def test_a_function_with_too_many_branches_is_found(tmp_path: Path) -> None:
    text = "def f(x):\n" + "    if x: pass\n" * 20
    assert faults_of(tmp_path, plan__more=text) == [
        "plan/more.py:2: f has a complexity of 21; divide it into functions of at most 20"
    ]


def test_a_file_without_a_docstring_is_found(tmp_path: Path) -> None:
    faults_of(tmp_path)
    (tmp_path / "pipedejavu" / "plan" / "word.py").write_text("word = 1\n")
    assert all_faults(tmp_path / "pipedejavu") == [
        "plan/word.py has no docstring; open it with what it owns and what it does not know"
    ]
