"""Workers that hang: in an action of their own, stopped by a signal, or with all their threads held up."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file

from pipedejavu.health.watchdog import (
    FACTOR,
    LANES,
    LEAST_LIMIT_S,
    HangWatchdog,
    HeartbeatMonitor,
    HeartbeatPage,
    LaneActivity,
)
from pipedejavu.session.rank_group import _end_sibling
from pipedejavu.store import CheckpointDir

TRAIN = (
    "train", "zoo:mlp", "--data", "random:64", "--samples", "3", "--plan", "preset:1f1b", "--workers", "2",
    "--microbatches", "2", "--run-dir", "run", "--checkpoint-every", "5", "--json",
)  # fmt: skip

# A worker whose n-th call of the model sleeps for ever, with the interpreter's lock or without it. All calls sleep a
# little, so that the checkpoint before is written: who keeps the lock keeps it from that, too.
FAULTY = """
import ctypes, os, time
from pipedejavu.engine.handlers import Handlers
from pipedejavu.launch import launch, worker

def patch(rank):
    forward, calls = Handlers.forward, iter(range(10**9))
    def faulty(self, a):
        time.sleep(0.05)
        if rank == {rank} and next(calls) == {call}:
            {sleep}
        return forward(self, a)
    Handlers.forward = faulty

def work(rank, size, launched):
    patch(rank)
    worker.work(rank, size, launched)

launch.work = work
"""
MAIN = "import faulty; from pipedejavu.cli.main import main; main()"
SLEEPS = {"sleeps": "time.sleep(1e6)", "keeps the lock": "ctypes.PyDLL(None).sleep(10**6)"}


def make_vigil(rank: int = 0) -> tuple[HangWatchdog, list[tuple[str, str]], threading.Event]:
    told: list[tuple[str, str]] = []
    ended = threading.Event()

    def end(trace: str, sentence: str) -> None:
        told.append((trace, sentence))
        ended.set()

    return HangWatchdog(rank, end), told, ended


def test_an_action_that_lasts_too_long_is_told_with_its_lane_and_its_place_in_the_code() -> None:
    watchdog, told, ended = make_vigil(3)
    watchdog.allow(1.0, 0.01)
    watchdog.notice("net<1", "RECV:x0.0<1")
    release = threading.Event()

    def lane_of_the_test() -> None:
        watchdog.notice("compute", "F0.1@0")
        release.wait()

    threading.Thread(target=lane_of_the_test, daemon=True).start()
    assert ended.wait(60)
    release.set()
    ((trace, sentence),) = told
    assert "in lane_of_the_test" in trace
    assert re.fullmatch(
        r"worker 3 hangs: F0\.1@0 \(lane compute\) has lasted \d+ s, and 0 s were allowed; --hang-after allows more",
        sentence,
    )


def test_who_waits_for_others_lets_them_tell_first() -> None:
    watchdog, _, _ = make_vigil()
    now_s = time.monotonic()
    watchdog.doing["net<1"] = LaneActivity("net<1", "RECV:x0.0<1", now_s - 50)
    watchdog.allow(1.0, 10.0)
    assert watchdog.hung() is None
    watchdog.doing["compute"] = LaneActivity("compute", "F0.1@0", now_s - 11)
    assert watchdog.hung() == watchdog.doing["compute"]
    watchdog.allow(1.0, 4.9)  # now both are late
    assert watchdog.hung() == watchdog.doing["compute"]
    del watchdog.doing["compute"]
    assert watchdog.hung() == watchdog.doing["net<1"]
    watchdog.allow(1.0, 0)
    assert watchdog.hung() is None


def test_what_is_allowed_follows_the_forecast_and_the_longest_action() -> None:
    watchdog, _, _ = make_vigil()
    watchdog.allow(0.001, None)
    assert watchdog.limit_s == LEAST_LIMIT_S
    watchdog.allow(20.0, None)
    assert watchdog.limit_s == FACTOR * 20.0
    for lane, lasted_s in (("net<1", 400.0), ("compute", 30.0)):  # others' time does not count
        watchdog.doing[lane] = LaneActivity(lane, "F0.1@0", time.monotonic() - lasted_s)
        watchdog.notice(lane, "")
    assert FACTOR * 30 <= watchdog.limit_s < FACTOR * 31
    watchdog.allow(20.0, 7.0)
    watchdog.doing["compute"] = LaneActivity("compute", "F0.1@0", time.monotonic() - 30)
    watchdog.notice("compute", "")
    assert watchdog.limit_s == 7.0


def test_a_worker_that_says_nothing_is_missed_with_what_it_was_at(tmp_path: Path, monkeypatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr("pipedejavu.health.watchdog.time.monotonic", lambda: now_s[0])
    heartbeat_page = HeartbeatPage(tmp_path / "heartbeats", 2)
    heartbeat_monitor = HeartbeatMonitor(HeartbeatPage(tmp_path / "heartbeats", 2), 2, 5.0)
    heartbeat_page.write(0, LaneActivity("net<1", "RECV:g1.0<1", 1.0))
    heartbeat_page.write(0, LaneActivity("compute", "B0.0@0", 2.0))
    assert heartbeat_monitor.missed((0, 1)) == ""
    now_s[0] += 6
    heartbeat_page.beat(1)
    assert heartbeat_monitor.missed((1,)) == ""
    assert heartbeat_monitor.missed((0,)).startswith("worker 0 was not heard for 5 s: its process is stopped, or ")
    assert heartbeat_monitor.missed((0,)).endswith("; it was at B0.0@0 (lane compute)")
    heartbeat_page.beat(0)
    heartbeat_page.wipe(0, "compute")
    assert heartbeat_monitor.missed((0, 1)) == ""
    now_s[0] += 6
    assert heartbeat_monitor.missed((0,)).endswith("; it was at RECV:g1.0<1 (lane net<1)")
    assert HeartbeatMonitor(heartbeat_page, 2, 0).missed((0, 1)) == ""


def test_a_slate_holds_what_fits(tmp_path: Path) -> None:
    heartbeat_page = HeartbeatPage(tmp_path / "heartbeats", 2)
    for n in range(2 * LANES):
        heartbeat_page.write(1, LaneActivity(f"net<{n}", "RECV:x0.0<1" * 9, 1.0))
    for n in range(2 * LANES):
        heartbeat_page.wipe(1, f"net<{n}")
    heartbeat_page.write(1, LaneActivity("net<2", "RECV:x0.0<1", 1.0))
    assert not any(heartbeat_page.read(0))
    assert b"net<2\tRECV:x0.0<1\0" in heartbeat_page.read(1)
    assert heartbeat_page.read(1).count(b"net") == 1


def start_faulty(processes, folder: Path, sleep: str, seed: int, *more: str):
    luck = random.Random(seed)
    rank, call = luck.randrange(2), luck.randrange(15, 40)  # each update has two, so between step 8 and step 20
    (folder / "faulty.py").write_text(FAULTY.format(rank=rank, call=call, sleep=SLEEPS[sleep]))
    return rank, processes.start((sys.executable, "-c", MAIN, *TRAIN, "--steps", "30", *more), folder)


def check_resume(processes, folder: Path, said: str) -> None:
    """The run goes on after the checkpoint that was named, and ends like one that nothing happened to."""
    named = re.search(r"--resume goes on after step (\d+)\n", said)
    assert named
    assert int(named[1]) == CheckpointDir(folder / "run" / "checkpoints").steps()[-1]
    code, _, err = processes.run((sys.executable, "-m", "pipedejavu", *TRAIN, "--steps", "30", "--resume"), folder)
    assert code == 0, err
    (folder / "again").mkdir()
    code, _, err = processes.run((sys.executable, "-m", "pipedejavu", *TRAIN, "--steps", "30"), folder / "again")
    assert code == 0, err
    ends = [load_file(path / "run" / "model.safetensors") for path in (folder, folder / "again")]
    assert all(torch.equal(weight, ends[1][name]) for name, weight in ends[0].items())


@pytest.mark.slow
@pytest.mark.parametrize(("sleep", "seed"), [("sleeps", n) for n in range(4)])
def test_a_unit_that_sleeps_for_ever_ends_the_run(processes, tmp_path: Path, sleep: str, seed: int) -> None:
    rank, process = start_faulty(processes, tmp_path, sleep, seed, "--hang-after", "5")
    code, out, err = processes.finish(process)
    assert (code, out) == (1, "")
    assert "time.sleep(1e6)" in err  # where it is in the code
    assert re.search(
        rf"\npipedejavu: worker {rank} hangs: F{rank}\.\d@0 \(lane compute\) has lasted \d+ s, and 5 s were allowed;"
        r" --hang-after allows more; all others were stopped; --resume goes on after step \d+\n$",
        err,
    )
    if seed:
        check_resume(processes, tmp_path, err)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_unit_that_keeps_the_interpreter_to_itself_ends_the_run(processes, tmp_path: Path, seed: int) -> None:
    rank, process = start_faulty(processes, tmp_path, "keeps the lock", seed, "--hang-after", "5")
    code, out, err = processes.finish(process)
    assert (code, out) == (1, "")
    assert re.search(
        rf"pipedejavu: worker {rank} was not heard for 5 s: its process is stopped, or one of its threads keeps all"
        rf" others from running; it was at F{rank}\.\d@0 \(lane compute\); all others were stopped; --resume goes on",
        err,
    )
    check_resume(processes, tmp_path, err)


def wait_for_step(process, folder: Path, step: int) -> None:
    metrics = folder / "run" / "metrics.jsonl"
    while process.poll() is None:
        rows = [json.loads(line) for line in metrics.read_text().splitlines()[:-1]] if metrics.exists() else []
        if any(row.get("step", 0) >= step for row in rows):
            return
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """Returns the workers that a launcher has started: spawned processes, without multiprocessing's tracker."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            is_worker = b"spawn_main" in (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == pid and is_worker:
            found.append(int(path.parent.name))
    return sorted(found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_worker_that_was_stopped_ends_the_run(processes, tmp_path: Path, seed: int) -> None:
    luck = random.Random(seed)
    steps = ("--steps", "100000", "--hang-after", "5")
    process = processes.start((sys.executable, "-m", "pipedejavu", *TRAIN, *steps), tmp_path)
    wait_for_step(process, tmp_path, luck.randrange(6, 20))
    time.sleep(luck.uniform(0.0, 0.2))
    rank = luck.randrange(2)
    os.kill(children(process.pid)[rank], signal.SIGSTOP)
    code, out, err = processes.finish(process)
    assert (code, out) == (1, "")
    assert re.search(
        r"pipedejavu: worker \d was not heard for 5 s: its process is stopped, or one of its threads keeps all"
        r" others from running; it was at .+; all others were stopped; --resume goes on after step \d+\n",
        err,
    )


def test_a_rank_ends_a_silent_one_of_the_same_agent_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        _end_sibling(other.pid)  # a child of this process is no sibling of it
        assert other.poll() is None
        monkeypatch.setattr(os, "getppid", os.getpid)  # as its sibling sees it
        os.kill(other.pid, signal.SIGSTOP)
        _end_sibling(other.pid)
        assert other.wait() == -signal.SIGKILL
        _end_sibling(other.pid)  # which is gone


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sleeps", "stopped"])
def test_torchrun_starts_ranks_again_where_one_hangs(processes, tmp_path: Path, kind: str) -> None:
    sleep = {"sleeps": "time.sleep(1e6)", "stopped": "os.kill(os.getpid(), 19)"}[kind]
    start = "\nfrom pipedejavu.cli.main import main\nif not int(os.environ['TORCHELASTIC_RESTART_COUNT']):\n"
    start += "    patch(int(os.environ['RANK']))\nmain()\n"
    (tmp_path / "faulty.py").write_text(FAULTY.format(rank=1, call=25, sleep=sleep) + start)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2")
    more = ("--steps", "30", "--hang-after", "6", "--resume")
    code, out, err = processes.run((*torchrun, "faulty.py", *TRAIN, *more), tmp_path)
    assert code == 0, err
    assert json.loads(out)["steps"] == 30
    sentence = {
        "sleeps": r"pipedejavu: worker 1 hangs: F1\.\d@0 \(lane compute\) has lasted \d+ s",
        "stopped": r"pipedejavu: rank 1 was not heard for 6 s: its process is stopped, .+; it was at .+; the ranks",
    }[kind]
    assert len(re.findall(sentence, err)) == 1
    assert "training goes on after step 10" in err
