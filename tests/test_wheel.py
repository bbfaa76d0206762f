"""The package as pip builds and installs it, with a C compiler and without one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECK = """
import sys
from importlib import resources
import pipedejavu
from pipedejavu.optim.native import library
from pipedejavu.plan import presets
from pipedejavu.report import render_html
assert pipedejavu.__file__.startswith(sys.argv[1]), pipedejavu.__file__
assert len(presets()) > 40
assert resources.files("pipedejavu.report").joinpath("page.html").is_file()
print(pipedejavu.__version__, library() is not None)
"""


def build(folder: Path, compiler: str | None) -> Path:
    """Returns the wheel of a copy of the source, built by a compiler or by none."""
    source = folder / "source"
    shutil.copytree(
        ROOT / "src", source / "src", ignore=shutil.ignore_patterns("_native.so", "_sampler.so", "__pycache__")
    )
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    environment = {**os.environ, "CC": compiler or str(folder / "none")}
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), str(source)]
    subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    (found,) = folder.glob("*.whl")
    return found


def install(wheel: Path, folder: Path) -> str:
    """Installs a wheel and returns what its package says of itself."""
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", str(folder), str(wheel)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(folder)],
        env=environment, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("has_compiler", [True, False])
def test_a_wheel_is_built_with_and_without_a_compiler(has_compiler: bool, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    compiler = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if has_compiler and compiler is None:
        pytest.skip("there is no C compiler")
    wheel = build(tmp_path, compiler if has_compiler else None)
    assert wheel.name.endswith("-py3-none-any.whl") != has_compiler
    version, is_native = install(wheel, tmp_path / "site").split()
    assert wheel.name.startswith(f"pipedejavu-{version}-")
    assert is_native == str(has_compiler)
