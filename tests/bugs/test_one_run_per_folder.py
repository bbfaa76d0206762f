"""A run takes the lock of its folder before it reads, cleans or writes anything there, and keeps it to its end."""

import json
import multiprocessing
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from pipedejavu.facts import InputError
from pipedejavu.launch import RankGroup, reopen
from pipedejavu.run import RunFolder, TrainOptions
from pipedejavu.run.run_lock import LOCK, is_locked, lock_run
from tests.cli.test_main import say
from tests.processes import processes  # noqa: F401

FORK = multiprocessing.get_context("fork")
HELD = r"another process trains in .* now; wait for it, or choose another --run-dir"


def _hold(path: Path, is_there, may_go) -> None:
    with lock_run(path):
        is_there.set()
        may_go.wait(60)


@pytest.fixture
def live(tmp_path: Path):
    """A folder in which a run writes the parts of its next checkpoint."""
    folder = RunFolder(tmp_path / "run")
    folder.checkpoint_dir.staging_dir(8).joinpath("part-00000.safetensors").write_bytes(b"half of it")
    TrainOptions(model="mlp").save(folder.path / "options.json")
    is_there, may_go = FORK.Event(), FORK.Event()
    process = FORK.Process(target=_hold, args=(folder.path, is_there, may_go))
    process.start()
    assert is_there.wait(60)
    yield folder
    may_go.set()
    process.join()


def test_a_start_that_is_refused_touches_nothing(live: RunFolder) -> None:
    before = sorted(path for path in live.path.rglob("*"))
    assert is_locked(live.path)
    with pytest.raises(InputError, match=HELD):
        reopen(str(live.path), RankGroup(), pytest.fail)
    for more in ((), ("--resume",), ("--resume", "--accept-changes", "--allow-restart")):
        done = say("train", "zoo:mlp", "--run-dir", str(live.path), *more)
        assert done.code == 2
        assert "another process trains in" in done.stderr
    assert sorted(path for path in live.path.rglob("*")) == before


def _contend(number: int, path: Path, gate, results) -> None:
    gate.wait(60)
    try:
        with lock_run(path):
            (path / "options.json").write_text(str(number))
            results.put(number)
            gate.wait(60)  # until all others were refused
    except InputError:
        results.put(None)
        gate.wait(60)


def test_of_six_that_start_at_once_one_holds_the_folder(tmp_path: Path) -> None:
    gate, results = FORK.Barrier(6), FORK.Queue()
    started = [FORK.Process(target=_contend, args=(n, tmp_path / "run", gate, results)) for n in range(6)]
    for process in started:
        process.start()
    found = [results.get(timeout=60) for _ in started]
    for process in started:
        process.join()
    (winner,) = [number for number in found if number is not None]
    assert (tmp_path / "run" / "options.json").read_text() == str(winner)
    assert not is_locked(tmp_path / "run")


def test_a_thread_may_enter_again_and_no_other_may(tmp_path: Path) -> None:
    refused: list[str] = []

    def enter() -> None:
        with pytest.raises(InputError, match=HELD), lock_run(tmp_path / "run"):
            pass
        refused.append("yes")

    with lock_run(tmp_path / "run"):
        with lock_run(str(tmp_path / "x" / ".." / "run")):
            pass
        assert is_locked(tmp_path / "run")
        other = threading.Thread(target=enter)
        other.start()
        other.join()
        assert is_locked(tmp_path / "run")
    assert refused == ["yes"]


def test_a_folder_that_was_made_for_nothing_goes_and_one_of_the_user_stays(tmp_path: Path) -> None:
    done = say("train", "zoo:mlp", "--run-dir", str(tmp_path / "run"), "--plan", "preset:none")
    assert done.code == 2
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    with lock_run(tmp_path / "mine"):
        assert [path.name for path in (tmp_path / "mine").iterdir()] == [LOCK]
    assert [*(tmp_path / "mine").iterdir()] == []
    with lock_run(tmp_path / "mine"):
        (tmp_path / "mine" / "metrics.jsonl").touch()
    assert (tmp_path / "mine" / LOCK).exists()


@pytest.mark.slow
def test_of_six_runs_that_start_at_once_one_trains_with_its_own_options(processes, tmp_path: Path) -> None:  # noqa: F811
    """New runs and resumed ones, in real processes; the others end with 2 and a sentence."""
    command = (sys.executable, "-m", "pipedejavu", "train", "zoo:mlp", "--data", "random:64", "--samples", "3")
    command += ("--plan", "preset:ddp", "--workers", "1", "--run-dir", "run", "--steps", "20", "--json")
    started = [
        processes.start((*command, "--seed", str(n), *(("--resume",) if n % 2 else ())), tmp_path) for n in range(6)
    ]
    found = [processes.finish(process) for process in started]
    codes = [code for code, _, _ in found]
    assert sorted(codes) == [0, 2, 2, 2, 2, 2], [err for _, _, err in found]
    winner = codes.index(0)
    assert json.loads(found[winner][1])["steps"] == 20
    options = RunFolder(tmp_path / "run").options()
    assert (options.seed, options.steps) == (winner, 20)
    for n, (code, _, err) in enumerate(found):
        if code:
            # One that comes when the winner has ended meets a whole run with another seed.
            known = ("another process trains in run", "holds a run already", f"was started with seed {winner}, not {n}")
            assert any(reason in err for reason in known), err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [*range(1, 21)]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
def test_under_torchrun_the_first_rank_holds_the_folder_and_a_whole_run_ends_with_0(processes, tmp_path: Path) -> None:  # noqa: F811
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = (*torchrun, "-m", "pipedejavu", "train", "zoo:mlp", "--data", "random:64", "--samples", "3", "--resume")
    command += ("--plan", "preset:ddp", "--steps", "4", "--run-dir", "run", "--json")
    with lock_run(tmp_path / "run"):
        code, out, err = processes.run(command, tmp_path)
    assert (code, out) == (1, "")  # torchrun's own
    assert err.count("another process trains in run now; wait for it, or choose another --run-dir") == 1
    assert not (tmp_path / "run").exists()
    for said in ("pipedejavu: run holds no run: training begins", "pipedejavu: nothing left to do: the run in run"):
        code, out, err = processes.run(command, tmp_path)
        assert code == 0, err
        assert json.loads(out)["steps"] == 4
        assert err.count(said) == 1
