"""A disk that fills up while a run trains: training goes on, and what it has trained is not lost."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")


from tests.train.conftest import processes  # noqa: F401

TRAIN = (
    "train", "zoo:mlp", "--data", "random:64", "--samples", "3", "--optimizer", "sgd", "--lr", "0.01", "--plan",
    "preset:ddp", "--workers", "2", "--checkpoint-every", "10",
)  # fmt: skip


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mounts a disk of its own of 32 MiB, where that is allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a disk of its own needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Fills a disk to its last byte."""
    ballast = folder / "ballast"
    for size in (2**16, 1):
        with suppress(OSError), ballast.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(size))
    return ballast


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_disk_that_stays_full_costs_nothing_that_was_trained(processes, small_disk: Path, tmp_path: Path) -> None:  # noqa: F811
    run, elsewhere = small_disk / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = (sys.executable, "-m", "pipedejavu", *TRAIN, "--steps", "400", "--run-dir", str(run))
    process = processes.start(command, tmp_path, TMPDIR=str(elsewhere))
    while process.poll() is None and not rows(run / "metrics.jsonl"):
        time.sleep(0.01)
    fill(small_disk)
    code, _, err = processes.finish(process)
    assert code == 74, err
    print(err)
