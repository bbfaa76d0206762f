"""The documentation: its Python runs, its commands are ones that exist, its links lead somewhere, the site builds."""

import os
import re
import shlex
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch")

from typer.testing import CliRunner

import pipedejavu
from pipedejavu.cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = {"tutorial.md": "", "trainer.md": "", "howto/schedule.md": "", "howto/larger-than-the-gpu.md": "transformers"}
"""Pages whose Python is one script, and the package that it needs."""


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **more}


@pytest.mark.parametrize("page", RUN)
def test_the_python_of_a_page_runs(page: str, tmp_path: Path) -> None:
    if RUN[page] and find_spec(RUN[page]) is None:
        pytest.skip(f"{RUN[page]} is not installed")
    script = "\n".join(blocks(ROOT / "docs" / page, "python"))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def commands() -> list[str]:
    found = []
    for page in PAGES:
        for text in (*blocks(page, "sh"), *blocks(page, "console")):
            lines = text.replace("\\\n", " ").splitlines()
            found += [line.partition("pipedejavu ")[2] for line in lines if re.search(r"\bpipedejavu \S", line)]
    return sorted({command.partition(" #")[0].strip() for command in found})


def test_every_command_of_the_pages_has_verbs_and_options_that_exist() -> None:
    shown = commands()
    assert len(shown) > 20
    for command in shown:
        words = shlex.split(command.lstrip("$ "))
        if words[0] in ("--install-completion", "--version"):
            continue
        done = CliRunner().invoke(app, [*words, "--help"])
        assert done.exit_code == 0, f"pipedejavu {command}: {done.output}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    missing = [t for t in targets if t and "://" not in t and not (page.parent / t).exists()]
    assert missing == []


def test_the_page_about_ray_shows_the_example() -> None:
    (shown,) = blocks(ROOT / "docs" / "howto" / "ray.md", "python")
    example = (ROOT / "examples" / "ray_launch.py").read_text()
    assert shown.partition("\ndef free_port")[2].strip() in example


@pytest.mark.slow
def test_the_script_for_slurm_is_the_page_s_and_runs_as_one_node(tmp_path: Path) -> None:
    path = ROOT / "examples" / "slurm.sh"
    (shown,) = blocks(ROOT / "docs" / "howto" / "slurm.md", "bash")
    assert path.read_text() == shown
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    number = (port - 20000) % 20000  # the script's port lies between 20000 and 40000
    tools = {
        "srun": 'shift; exec "$@"',
        "scontrol": "echo localhost",
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node0", "SLURM_JOB_ID": str(number), "SLURM_NNODES": "1"}
    asked = {"MODEL": "zoo:mlp", "WORKERS_PER_NODE": "2", "STEPS": "3", "RUN_DIR": str(tmp_path / "run")}
    done = subprocess.run(
        ["bash", path], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200,
        env=environment(PATH=f"{tmp_path}:{os.environ['PATH']}", **slurm, **asked),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment(NO_MKDOCS_2_WARNING="1")
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert (tmp_path / "site" / "index.html").exists()


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    listed = {line.rpartition(".")[2] for line in page.splitlines() if line.startswith("::: ")}
    assert listed == {*pipedejavu.__all__} - {"__version__"}
