"""How the processes of workers are started."""

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.launch.launch import run_workers
from pipedejavu.launch.worker_process import WorkerLaunch
from pipedejavu.run.run_folder import RunFolder


def note_policy(rank: int, _: int, launched: WorkerLaunch) -> None:
    Path(launched.run_dir, f"policy{rank}").write_text(os.environ.get("OMP_WAIT_POLICY", "torch's own"))


@pytest.mark.parametrize(
    ("size", "given", "expected"), [(1, None, "torch's own"), (2, None, "passive"), (2, "active", "active")]
)
def test_threads_of_workers_that_share_a_host_sleep_between_operations(
    size: int, given: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    folder = RunFolder(str(tmp_path / "run"))
    folder.parts.mkdir(parents=True)
    assert run_workers(folder, size, entry=note_policy) == []
    assert {(folder.path / f"policy{rank}").read_text() for rank in range(size)} == {expected}
    assert os.environ.get("OMP_WAIT_POLICY") == given
