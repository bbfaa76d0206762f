"""Workers end with the launcher, whatever they are at; a closed terminal saves a run as SIGTERM does."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from pipedejavu.run.stop_signal import stop_signals
from pipedejavu.store import Checkpoint, CheckpointDir
from tests.processes import ROOT, processes  # noqa: F401

TRAIN = (
    sys.executable, "-m", "pipedejavu", "train", "zoo:mlp", "--data", "random:64", "--samples", "3", "--plan",
    "preset:ddp", "--workers", "2", "--steps", "100000", "--run-dir", "run",
)  # fmt: skip

SPAWN = """
import multiprocessing, os, signal, time
from pipedejavu.facts import end_with_parent

def stop():
    end_with_parent()
    print(os.getpid(), flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1e6)

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=stop, daemon=True).start()
    time.sleep(1e6)
"""

PAIR = """
import os, signal, time
from pipedejavu.probe.pair import Pair

if __name__ == "__main__":
    with Pair(1) as pair:
        pair.wait()
        for process in pair.processes:
            os.kill(process.pid, signal.SIGSTOP)
        print(*(process.pid for process in pair.processes), flush=True)
        time.sleep(1e6)
"""


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def wait_until_gone(pids: list[int]) -> list[int]:
    """Returns those that are still there after a minute."""
    last_s = time.monotonic() + 60
    while (left := [pid for pid in pids if not is_gone(pid)]) and time.monotonic() < last_s:
        time.sleep(0.02)
    return left


def workers_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def wait_for_metrics(process: subprocess.Popen, folder: Path) -> None:
    metrics = folder / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 2):
        time.sleep(0.02)
    assert process.poll() is None


@pytest.mark.parametrize("code", [SPAWN, pytest.param(PAIR, marks=pytest.mark.slow)], ids=["any", "probe's"])
def test_a_process_that_is_stopped_ends_with_its_parent(processes, tmp_path: Path, code: str) -> None:  # noqa: F811
    (tmp_path / "parent.py").write_text(code)
    parent = processes.start((sys.executable, "parent.py"), tmp_path)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    try:
        assert pids
        parent.kill()
        assert wait_until_gone(pids) == []
    finally:
        for pid in pids:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


def test_workers_that_are_stopped_end_with_the_launcher(processes, tmp_path: Path) -> None:  # noqa: F811
    process = processes.start((*TRAIN, "--checkpoint-every", "0"), tmp_path)
    wait_for_metrics(process, tmp_path)
    workers = workers_of(process.pid)
    try:
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGSTOP)
        process.kill()
        assert wait_until_gone(workers) == []
    finally:
        for pid in workers:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_terminal_that_is_closed_saves_the_run(processes, tmp_path: Path) -> None:  # noqa: F811
    """The system sends SIGHUP to all processes in front of a terminal, which then refuses all that is printed."""
    terminal, inside = pty.openpty()
    with subprocess.Popen(
        TRAIN, cwd=tmp_path, stdin=inside, stdout=inside, stderr=inside, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        processes.started.append(process)
        os.close(inside)
        os.set_blocking(terminal, False)
        metrics = tmp_path / "run" / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 2):
            try:
                os.read(terminal, 2**16)  # a terminal that is not read blocks those that print
            except BlockingIOError:
                time.sleep(0.02)
        os.close(terminal)
        assert process.wait(120) == 128 + signal.SIGHUP
    steps = CheckpointDir(tmp_path / "run" / "checkpoints").steps()
    assert len(steps) == 1
    Checkpoint(CheckpointDir(tmp_path / "run" / "checkpoints").folder(steps[0])).verify()
    assert '"stopped"' in metrics.read_text()


def test_a_run_under_nohup_keeps_ignoring_what_it_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert stop_signals() == (signal.SIGTERM,)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert stop_signals() == (signal.SIGTERM, signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
