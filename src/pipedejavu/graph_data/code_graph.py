"""The graph of Python's standard library: modules, classes and functions, joined by what they contain, import, call and
inherit.

The class of a node is its top-level package. Features are the words of its name and docstring, hashed; neither the
package's name nor any path is among them. Files are parsed and never run.
"""

import ast
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipedejavu.facts import InputError
from pipedejavu.graph_data.csr_graph import CsrGraph, open_graph, save_graph

NUM_FEATURES = 256
MOST_CLASSES = 40
"""The largest packages are classes; nodes of other packages have no label."""
TEST_SHARE = 0.2
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
_FORMAT = 1
_MOST_BYTES = 1 << 22
"""Larger source files are left out."""
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


@dataclass
class _Node:
    """A module, a class or a function."""

    package: str
    words: Counter[str]
    uses: set[str] = field(default_factory=set)
    """Full names that it imports, or bare names that it calls or inherits."""
    near: list[int] = field(default_factory=list)
    """The node that contains it."""


def open_code_graph(root: Path) -> CsrGraph:
    """Opens the graph of this Python's standard library in a folder of `root`, and makes it if it is not there."""
    library = Path(sysconfig.get_paths()["stdlib"])
    folder = root / f"stdlib-{sysconfig.get_python_version()}-v{_FORMAT}"
    if not (folder / "graph.json").is_file():
        save_graph(make_code_graph(library), folder)
    return open_graph(folder)


def make_code_graph(library: Path) -> CsrGraph:
    """Makes the graph of all Python files below a folder."""
    names: dict[str, int] = {}
    nodes: list[_Node] = []
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if not _SKIPPED & {*parts} and path.is_file() and path.stat().st_size <= _MOST_BYTES:
            _read(path, parts[:-1] if parts[-1] == "__init__" else parts, names, nodes)
    if not nodes:
        raise InputError(f"there are no Python files in {library}, where the standard library should be")
    indptr, indices = _edges(nodes, names)
    labels, num_classes = _labels(nodes)
    known = np.flatnonzero(labels >= 0)
    order = np.random.Generator(np.random.SFC64(0)).permutation(known)
    num_test = max(1, int(TEST_SHARE * len(known)))
    return CsrGraph(
        name="stdlib", indptr=indptr, indices=indices, features=_features(nodes), labels=labels,
        train=np.sort(order[num_test:]), test=np.sort(order[:num_test]), num_classes=num_classes,
    )  # fmt: skip


def _read(path: Path, parts: tuple[str, ...], names: dict[str, int], nodes: list[_Node]) -> None:
    """Adds the nodes of one file."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return
    module = ".".join(parts)
    root = _add(module, parts[0], parts[-1], tree, names, nodes)
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            nodes[root].uses.update(alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            base = ".".join(parts[: len(parts) - statement.level]) if statement.level else ""
            start = ".".join(filter(None, (base, statement.module or "")))
            nodes[root].uses.update({start, *(f"{start}.{alias.name}" for alias in statement.names)})
    _descend(tree, module, parts[0], root, names, nodes)


def _descend(tree: ast.AST, prefix: str, package: str, above: int, names: dict[str, int], nodes: list[_Node]) -> None:
    """Adds the classes and functions in a module or a class, with what they call and inherit."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        number = _add(f"{prefix}.{child.name}", package, child.name, child, names, nodes)
        nodes[number].near.append(above)
        if isinstance(child, ast.ClassDef):
            nodes[number].uses.update(filter(None, map(_called, child.bases)))
            _descend(child, f"{prefix}.{child.name}", package, number, names, nodes)
        else:
            calls = (part.func for part in ast.walk(child) if isinstance(part, ast.Call))
            nodes[number].uses.update(filter(None, map(_called, calls)))


def _add(full: str, package: str, name: str, tree: ast.AST, names: dict[str, int], nodes: list[_Node]) -> int:
    documented = isinstance(tree, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    text = (ast.get_docstring(tree) or "") if documented else ""  # type: ignore[arg-type]
    words = Counter(word.lower() for word in _WORD.findall(f"{name} {text}") if len(word) > 1)
    del words[package.lower().strip("_")]
    nodes.append(_Node(package, words))
    names.setdefault(full, len(nodes) - 1)
    return len(nodes) - 1


def _called(function: ast.expr) -> str | None:
    """Returns the last name of what is called or inherited."""
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else None


def _edges(nodes: list[_Node], names: dict[str, int]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Returns the edges in both directions; a bare name that several nodes have joins those of its own package."""
    by_name: dict[str, list[int]] = defaultdict(list)
    for full, number in names.items():
        by_name[full.rpartition(".")[2]].append(number)
    pairs = {pair for number, node in enumerate(nodes) for pair in _joined(number, node, nodes, names, by_name)}
    rows = np.array(sorted({*pairs, *((b, a) for a, b in pairs)}), np.int64).reshape(-1, 2)
    indptr = np.zeros(len(nodes) + 1, np.int64)
    np.cumsum(np.bincount(rows[:, 0], minlength=len(nodes)), out=indptr[1:])
    return indptr, rows[:, 1].astype(np.int32)


def _joined(
    number: int, node: _Node, nodes: list[_Node], names: dict[str, int], by_name: dict[str, list[int]]
) -> Iterator[tuple[int, int]]:
    """Yields the edges from one node."""
    for used in sorted(node.uses):
        if used in names:
            targets = [names[used]]
        else:
            targets = by_name.get(used, [])
            if len(targets) > 1:
                targets = [other for other in targets if nodes[other].package == node.package][:1]
        yield from ((number, other) for other in targets if other != number)
    yield from ((number, other) for other in node.near if other != number)


def _labels(nodes: list[_Node]) -> tuple[NDArray[np.int64], int]:
    """Returns the package of each node among the largest ones, and how many there are."""
    sizes = Counter(node.package for node in nodes)
    largest = sorted(sizes, key=lambda package: (-sizes[package], package))[:MOST_CLASSES]
    numbers = {package: number for number, package in enumerate(largest)}
    return np.array([numbers.get(node.package, -1) for node in nodes], np.int64), max(2, len(numbers))


def _features(nodes: list[_Node]) -> NDArray[np.float32]:
    """Returns word counts, hashed to a fixed number of signed columns and scaled to length 1."""
    features = np.zeros((len(nodes), NUM_FEATURES), np.float32)
    for row, node in zip(features, nodes, strict=True):
        for word, count in node.words.items():
            bits = int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "little")
            row[bits % NUM_FEATURES] += (1 if bits >> 63 else -1) * (1 + np.log(count))
        row /= max(1e-6, float(np.linalg.norm(row)))
    return features
