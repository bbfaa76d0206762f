"""A disk that fills up while a run trains: training goes on, and nothing that was trained is lost."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file

from pipedejavu.store import Checkpoint, CheckpointDir
from tests.processes import processes  # noqa: F401

TRAIN = (
    "train", "zoo:mlp", "--data", "random:64", "--samples", "3", "--optimizer", "sgd", "--lr", "0.01", "--plan",
    "preset:ddp", "--workers", "2", "--checkpoint-every", "50",
)  # fmt: skip
STEPS = 200

# Workers that wait for a full disk for less time than those of a user, and say how many keys the store has at the end.
IMPATIENT = """
import sys
from pipedejavu.launch import launch, worker
from pipedejavu.run import fallback_folder
from pipedejavu.store import saver

saver.PATIENCE_S = fallback_folder.PATIENCE_S = 0.2

class Rank(worker.Rank):
    def run(self, checkpoint_dir):
        result = super().run(checkpoint_dir)
        print(f"rank {self.rank} leaves {self.store.num_keys()} keys", file=sys.stderr, flush=True)
        return result

def work(rank, size, launched):
    worker.Rank = Rank
    worker.work(rank, size, launched)

launch.work = work
"""
MAIN = "import impatient; from pipedejavu.cli.main import main; main()"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mounts a disk of 32 MiB, if that is allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
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


def train_on_full_disk(processes, small_disk: Path, tmp_path: Path) -> tuple[Path, str]:  # noqa: F811
    """Fills a run's disk at its first steps, to its end; returns the folder that it fell back to and what it said."""
    run, elsewhere = small_disk / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    command = (sys.executable, "-c", MAIN, *TRAIN, "--steps", str(STEPS), "--run-dir", str(run))
    process = processes.start(command, tmp_path, TMPDIR=str(elsewhere))
    while process.poll() is None and not rows(run / "metrics.jsonl"):
        time.sleep(0.01)
    fill(small_disk)
    code, _, err = processes.finish(process)
    assert code == 74, err
    assert f"pipedejavu: the disk of {run} takes no more: checkpoints/step-{STEPS}, model.safetensors" in err
    (found,) = elsewhere.glob("pipedejavu-run-*")
    assert f" went to {found}; make room, and move them back\n" in err
    return found, err


def test_a_disk_that_stays_full_costs_nothing_that_was_trained(processes, small_disk: Path, tmp_path: Path) -> None:  # noqa: F811
    found, err = train_on_full_disk(processes, small_disk, tmp_path)
    assert "the checkpoint of step 100 was not saved: No space left on device" in err
    assert [row["step"] for row in rows(found / "metrics.jsonl") if "step" in row] == [*range(1, STEPS + 1)]
    assert {"measured.json", "report.html"} <= {path.name for path in found.iterdir()}
    saved, model = Checkpoint(found / f"step-{STEPS}"), load_file(found / "model.safetensors")
    saved.verify()
    assert all(torch.equal(saved.tensor(f"weight/{name}"), weight) for name, weight in model.items())
    # Reports are taken out of the store, however many a run makes.
    assert all(int(line.split()[3]) < 60 for line in err.splitlines() if line.endswith(" keys")), err


@pytest.mark.slow
def test_what_went_elsewhere_is_what_an_undisturbed_run_ends_with(processes, small_disk: Path, tmp_path: Path) -> None:  # noqa: F811
    found, _ = train_on_full_disk(processes, small_disk, tmp_path)
    plain = (sys.executable, "-m", "pipedejavu", *TRAIN, "--steps")
    code, _, err = processes.run((*plain, str(STEPS), "--run-dir", "plain"), tmp_path)
    assert code == 0, err
    for moved in (found, small_disk / "run"):
        model, expected = (load_file(path / "model.safetensors") for path in (moved, tmp_path / "plain"))
        assert all(torch.equal(weight, expected[name]) for name, weight in model.items())
        if moved is found:
            (small_disk / "ballast").unlink()
            shutil.move(found / f"step-{STEPS}", small_disk / "run" / "checkpoints")
            for name in ("model.safetensors", "metrics.jsonl"):
                shutil.move(found / name, small_disk / "run" / name)
    assert CheckpointDir(small_disk / "run" / "checkpoints").steps()[-1] == STEPS
    for folder in (small_disk / "run", tmp_path / "plain"):
        more = ("--run-dir", str(folder), "--resume")
        code, _, err = processes.run((*plain, str(STEPS + 20), *more), tmp_path)
        assert code == 0, err
        assert f"training goes on after step {STEPS}" in err
    model, expected = (load_file(path / "model.safetensors") for path in (small_disk / "run", tmp_path / "plain"))
    assert all(torch.equal(weight, expected[name]) for name, weight in model.items())
