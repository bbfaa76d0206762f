"""Prints docstrings drawn at random from the source, to be read cold: does one reading suffice?

python docs/sample.py --number 60 --seed 1

Draws among modules, classes, functions and fields (the string under a field); prints file:line, the line of code that
the docstring belongs to, and its text.
"""

import argparse
import ast
import inspect
import random
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[1] / "src"


class Docstring(NamedTuple):
    """One docstring and where it stands."""

    path: Path
    line: int
    """Line of the docstring itself."""
    signature: str
    """What it documents: the module's name, a `class` or `def` line, or the field's declaration."""
    text: str


def docstrings_of(path: Path) -> Iterator[Docstring]:
    """Yields all docstrings of a file, those under fields and constants included."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for before, statement in zip([None, *node.body], node.body, strict=False):
            if (text := _text_of(statement)) is None:
                continue
            if before is None:
                yield Docstring(path, statement.lineno, _signature_of(node, path), text)
            elif isinstance(before, ast.Assign | ast.AnnAssign):
                yield Docstring(path, statement.lineno, ast.unparse(before), text)


def _text_of(statement: ast.stmt) -> str | None:
    """Returns the text of a statement that is only a string, else None."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        value = statement.value.value
        return value if isinstance(value, str) else None
    return None


def _signature_of(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, path: Path) -> str:
    """Returns the header of a class or function on one line, or the name of a module."""
    if isinstance(node, ast.Module):
        return f"module {path.parent.name}.{path.stem}"
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"def {node.name}({ast.unparse(node.args)}){returns}"


def draw(source: Path, number: int, seed: int) -> list[Docstring]:
    """Draws docstrings at random, without replacement; the same for the same tree and seed."""
    everything = [docstring for path in sorted(source.rglob("*.py")) for docstring in docstrings_of(path)]
    return random.Random(seed).sample(everything, min(number, len(everything)))


def main() -> None:
    """Prints the sample, numbered."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--number", type=int, default=60, help="docstrings to draw")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw")
    parser.add_argument("--source", type=Path, default=SOURCE, help="folder to draw from")
    options = parser.parse_args()
    for number, docstring in enumerate(draw(options.source, options.number, options.seed), 1):
        print(f"{number:3}. {docstring.path.relative_to(options.source)}:{docstring.line}")
        print(textwrap.indent(textwrap.shorten(docstring.signature, 160, placeholder=" …"), "     "))
        print(textwrap.indent(inspect.cleandoc(docstring.text), "     | ", lambda _: True), end="\n\n")


if __name__ == "__main__":
    main()
