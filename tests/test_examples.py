"""Every example runs, and the pages made from the code are what the code makes now."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDS = {
    "trainer_transformers.py": ("transformers",),
    "hybrid_trainer.py": ("transformers", "accelerate"),
    "hybrid_accelerate.py": ("accelerate",),
    "ray_launch.py": ("ray",),
}
"""Packages that are no part of the project's own."""


def python(*arguments: str, **variables: str) -> str:
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, cwd=ROOT, env=environment
    ).stdout


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_runs_and_is_short(path: Path) -> None:
    missing = [name for name in NEEDS.get(path.name, ()) if find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed")
    assert python(str(path))
    assert len(path.read_text().splitlines()) <= 60


def test_one_script_runs_alone_with_two_workers_and_on_two_ranks() -> None:
    script = "examples/trainer_anywhere.py"
    alone, two = python(script), python(script, WORKERS="2")
    launched = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script)
    assert alone.count("\n") == 1
    assert alone.partition(",")[0] == two.partition(",")[0] == launched.partition(",")[0]  # the losses are equal


def test_the_page_of_presets_is_up_to_date() -> None:
    assert (ROOT / "docs" / "presets.md").read_text() == python("docs/presets.py")


def test_the_python_of_the_tour_runs() -> None:
    tour = (ROOT / "docs" / "tour.md").read_text()
    first, second = (part.split("```")[0] for part in tour.split("```python\n")[1:])
    assert python("-c", first).splitlines()[1] == "F0.0@0 SEND:x0.0>1 F0.1@0 SEND:x0.1>1"
    losses = [float(line) for line in python("-c", second).splitlines()]
    assert losses == sorted(losses, reverse=True)


def test_the_grid_of_the_tour_is_what_the_command_prints() -> None:
    tour = (ROOT / "docs" / "tour.md").read_text()
    shown = [line for line in tour.splitlines() if line.startswith(("w0 ", "w1 ", "w2 ", "w3 "))]
    page = (ROOT / "docs" / "presets.md").read_text()
    assert len(shown) == 4
    assert "\n".join(shown) in page.split("## 1f1b\n")[1]
