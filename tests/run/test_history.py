"""What a run folder tells of its run: state, losses, rates, events."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.facts import InputError
from pipedejavu.plan import preset
from pipedejavu.run import History, RunFolder, StoppedError, TrainOptions, find_runs
from pipedejavu.run.run_lock import lock_run, noted


def make(path: Path, *rows: dict, is_done: bool = False) -> RunFolder:
    path.mkdir(parents=True)
    TrainOptions(model="mlp", steps=4).save(path / "options.json")
    preset("ddp").at(workers=2).save(path / "plan.json")
    folder = RunFolder(path)
    for row in rows:
        folder.add_metrics(row)
    if is_done:
        folder.model.touch()
    return folder


def step(number: int, elapsed_s: float) -> dict:
    return {"step": number, "loss": 1 / number, "count": 64, "samples": 8, "elapsed_s": elapsed_s, "peak_bytes": number}


def test_steps_and_rates_are_those_of_the_metrics(tmp_path: Path) -> None:
    make(tmp_path / "a", step(1, 5.0), step(2, 6.0), step(3, 6.0), step(4, 8.0), is_done=True)
    run = History.read(tmp_path / "a")
    assert run.state == "finished"
    assert [found.loss for found in run.steps] == [1, 1 / 2, 1 / 3, 1 / 4]
    assert [*run.rates()] == [(2, 8, 1.0), (4, 16, 2.0)]
    assert run.samples_per_s == 8.0
    assert run.step_s == 1.0
    assert (run.step_s_after(1), run.step_s_after(2)) == (1.0, 2.0)
    assert run.step_s_after(3) is None
    assert run.peak_bytes == 4


def test_updates_of_a_candidate_have_losses_and_no_time(tmp_path: Path) -> None:
    won = ({"step": n, "loss": 9.0 - n, "candidate": 1} for n in (1, 2))
    make(tmp_path / "a", *won, step(3, 2.0), step(4, 4.0), is_done=True)
    run = History.read(tmp_path / "a")
    assert [found.loss for found in run.steps] == [8.0, 7.0, 1 / 3, 1 / 4]
    assert (run.samples_per_s, run.step_s) == (4.0, 2.0)


def test_a_run_without_steps_has_no_figures(tmp_path: Path) -> None:
    make(tmp_path / "a")
    run = History.read(tmp_path / "a")
    assert (run.steps, run.samples_per_s, run.step_s, run.peak_bytes, run.events) == ([], None, None, None, [])
    assert (run.state, run.reason) == ("failed", "it ended without a word")


def test_events_stand_after_their_step(tmp_path: Path) -> None:
    rows = (step(1, 1.0), {"saved": 1, "size_bytes": 1024, "took_s": 0.5}, {**step(2, 2.0), "skipped": True})
    make(tmp_path / "a", *rows, {"resumed": 1}, {"switched": "ddp", "to": "1f1b"})
    assert History.read(tmp_path / "a").events == [
        (1, "saved", "step 1, 1.0 KiB in 500 ms"),
        (2, "skipped", "skipped"),
        (2, "resumed", "after step 1"),
        (2, "switched", "switched ddp; to 1f1b"),
    ]


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (StoppedError("stopped by SIGTERM"), "stopped", ""),
        (KeyboardInterrupt(), "stopped", ""),
        (RuntimeError("a trace\nworker 1 was ended by SIGKILL"), "failed", "worker 1 was ended by SIGKILL"),
        (RuntimeError(), "failed", "RuntimeError"),
    ],
)
def test_a_run_that_does_not_end_says_why(error: BaseException, state: str, reason: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "a", step(1, 1.0))

    def fail() -> None:
        with lock_run(folder.path), noted(folder):
            assert History.read(folder.path).state == "running"
            raise error

    with pytest.raises(type(error)):
        fail()
    run = History.read(folder.path)
    assert (run.state, run.reason) == (state, reason)
    assert run.events[0].step == 1


def _hold_for_ever(path: str, is_there: "multiprocessing.synchronize.Event") -> None:
    with lock_run(path):
        is_there.set()
        multiprocessing.Event().wait()


def test_a_process_that_is_killed_lets_go_of_its_folder(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", step(1, 1.0))
    context = multiprocessing.get_context("fork")
    is_there = context.Event()
    process = context.Process(target=_hold_for_ever, args=(str(folder.path), is_there), daemon=True)
    process.start()
    assert is_there.wait(60)
    assert History.read(folder.path).state == "running"
    said = r"another process trains in .*a now; wait for it, or choose another"
    with pytest.raises(InputError, match=said), lock_run(folder.path):
        pass
    process.kill()
    process.join()
    with lock_run(folder.path):
        pass
    assert History.read(folder.path).reason == "it ended without a word"


def test_runs_are_listed_with_the_last_first(tmp_path: Path) -> None:
    for name, moment in (("a", 2), ("b", 3), ("c", 1)):
        folder = make(tmp_path / name, step(1, 1.0))
        os.utime(folder.metrics, (moment, moment))
    (tmp_path / "other").mkdir()
    make(tmp_path / "torn").path.joinpath("plan.json").write_text("{")
    said: list[str] = []
    assert [run.folder.path.name for run in find_runs(tmp_path, said.append)] == ["b", "a", "c"]
    assert [sentence.partition(":")[0] for sentence in said] == ["torn is left out"]


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no folder .*none; 'train' writes runs to runs/"):
        find_runs(tmp_path / "none", print)
    with pytest.raises(InputError, match="holds no run; give a folder that 'train --run-dir' wrote"):
        History.read(tmp_path)


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", step(1, 1.0))
    with folder.metrics.open("a") as file:
        file.write(json.dumps(step(2, 2.0))[:20])
    assert [found.step for found in History.read(folder.path).steps] == [1]
