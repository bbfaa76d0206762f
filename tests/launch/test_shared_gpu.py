"""Several workers on one GPU: whole runs through CUDA IPC, audited."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
SMALL = ("zoo:mlp", "--data", "random:64", "--samples", "3", "--steps", "5", "--optimizer", "sgd", "--lr", "0.01")


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_gpu) for name in ("1f1b", "ddp", "zb-h1")])
def test_two_workers_train_on_one_gpu(processes, tmp_path: Path, name: str) -> None:
    sizes = ("--workers", "2", "--microbatches", "4", "--run-dir", "run", "--clip-norm", "1")
    plan = ("--plan", f"preset:{name}", "--devices", "shared-gpu", "--audit")
    code, out, err = processes.run((sys.executable, "-m", "pipedejavu", "train", *SMALL, *plan, *sizes), tmp_path)
    assert code == 0, err
    assert "wires: cuda-ipc (the ranks share one GPU)" in err
    assert "audit passed: largest " in out


def test_without_a_gpu_there_is_none_to_share(processes, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    plan = ("--plan", "preset:1f1b", "--workers", "2", "--devices", "shared-gpu")
    code, out, err = processes.run((sys.executable, "-m", "pipedejavu", "train", *SMALL, *plan), tmp_path)
    assert (code, out) == (2, "")
    assert "which has no GPU to share; use --devices auto" in err
