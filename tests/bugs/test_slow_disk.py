"""Disks that refuse or do not answer, in one process: savers, the last files of a run, and the check before it."""

import errno
import os
import queue
import re
import shutil
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file
from torch.distributed import HashStore, PrefixStore

from pipedejavu.engine import Log
from pipedejavu.facts import InputError
from pipedejavu.launch import rank_monitor
from pipedejavu.launch.rank_monitor import RankMonitor
from pipedejavu.run import RunFolder
from pipedejavu.run import fallback_folder as fallback_module
from pipedejavu.run import run_folder as folder_module
from pipedejavu.run.disk_space import check_disk_space
from pipedejavu.run.logbook import Logbooks
from pipedejavu.run.metrics import MetricsCollector, MetricsReporter
from pipedejavu.run.progress import Progress
from pipedejavu.run.stop_signal import StopSignal
from pipedejavu.store import CheckpointDir, Saver
from pipedejavu.store import saver as saver_module
from tests.search.case import profile

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
MIB = 2.0**20


class Ones:
    """Microbatches of one sample."""

    def count(self, _: int) -> int:
        return 1


Usage = namedtuple("Usage", "total used free")


def refuse_saves(monkeypatch: pytest.MonkeyPatch, path: Path, times: int) -> list[int]:
    """Makes a checkpoint directory refuse this many saves; returns a list with an entry for each refusal."""
    staging_dir, refused = CheckpointDir.staging_dir, list[int]()

    def full(self: CheckpointDir, step: int) -> Path:
        if self.path == path and len(refused) < times:
            refused.append(step)
            raise FULL
        return staging_dir(self, step)

    monkeypatch.setattr(CheckpointDir, "staging_dir", full)
    return refused


def make_savers(tmp_path: Path, told: list[str], rows: list[dict]) -> tuple[HashStore, list[Saver]]:
    def elsewhere(size_bytes: int) -> Path:
        assert size_bytes == 6 * 4
        return tmp_path / "elsewhere"

    (tmp_path / "elsewhere").mkdir()
    store, checkpoint_dir = HashStore(), CheckpointDir(tmp_path / "own")
    more = {"tell": told.append, "note": rows.append, "fallback": elsewhere}
    return store, [Saver(checkpoint_dir, rank=rank, store=(store, 2), **more) for rank in range(2)]


def save(savers: list[Saver], step: int, *, is_last: bool = False) -> None:
    for rank, saver in enumerate(savers):
        tensors = {f"weight/{rank}": torch.full((3,), float(10 * step + rank))}
        saver.save(step, tensors, lambda: {"samples": step}, is_last=is_last)


@pytest.mark.parametrize("times", [2, 10**6])
def test_the_last_checkpoint_is_tried_again_and_then_written_elsewhere(tmp_path, monkeypatch, times: int) -> None:
    told, rows = list[str](), list[dict]()
    store, savers = make_savers(tmp_path, told, rows)
    save(savers, 1)
    for saver in savers:
        saver.wait()
    monkeypatch.setattr(saver_module, "PATIENCE_S", 1e9 if times == 2 else 0.05)
    monkeypatch.setattr(saver_module, "RETRY_S", 0.01)
    refused = refuse_saves(monkeypatch, tmp_path / "own", times)
    save(savers, 2, is_last=True)
    for saver in savers:
        saver.wait()
    assert len(refused) >= 2
    assert told[0].startswith("the checkpoint of step 2 was not saved: No space left on device (worker ")
    place = tmp_path / ("own" if times == 2 else "elsewhere")
    found = CheckpointDir(place).newest(pytest.fail)
    assert found is not None
    assert [found.tensor(f"weight/{rank}").tolist() for rank in range(2)] == [[20.0] * 3, [21.0] * 3]
    assert savers[0].moved == ({} if times == 2 else {2: place / "step-2"})
    if times > 2:
        assert told[1] == f"the checkpoint of step 2 is in {place}; move it to {tmp_path / 'own'} before --resume"
        assert CheckpointDir(tmp_path / "own").steps() == [1]
        assert not list((tmp_path / "own").glob("*.tmp"))
    assert store.num_keys() == 0


def test_a_last_checkpoint_that_no_disk_takes_is_said_to_be_lost(tmp_path, monkeypatch) -> None:
    told, rows = list[str](), list[dict]()
    _, savers = make_savers(tmp_path, told, rows)
    monkeypatch.setattr(saver_module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(CheckpointDir, "staging_dir", lambda *_: (_ for _ in ()).throw(FULL))
    save(savers, 2, is_last=True)
    for saver in savers:
        saver.wait()
    assert told[-1].startswith("the checkpoint of step 2 was not saved: No space left on device (worker ")
    assert told[-1].endswith("; there is none yet")
    assert [row["not_saved"] for row in rows] == [2]


def test_a_disk_that_does_not_answer_is_reported_while_training_continues(tmp_path, monkeypatch) -> None:
    told, rows, frozen, said = list[str](), list[dict](), threading.Event(), threading.Event()
    _, savers = make_savers(tmp_path, told, rows)
    fsync = os.fsync

    def tell(sentence: str) -> None:
        told.append(sentence)
        said.set()

    def stuck(file: int) -> None:
        assert frozen.wait(60)
        fsync(file)

    savers[0].tell = tell
    monkeypatch.setattr(saver_module, "SLOW_S", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", stuck)
        save(savers, 1)
        assert said.wait(60)
        assert told[0] == (
            f"writing the checkpoint of step 1 has taken 0 s so far: the disk of {tmp_path / 'own'} is slow or does not"
            " answer; training goes on"
        )
        save(savers, 2)  # returns, with nothing written
        assert any(t.startswith("the checkpoint of step 2 is left out: that of step 1 is still being") for t in told)
        frozen.set()
        for saver in savers:
            saver.wait()
    monkeypatch.setattr(saver_module, "SLOW_S", 60.0)
    save(savers, 3)
    for saver in savers:
        saver.wait()
    assert CheckpointDir(tmp_path / "own").steps() == [1, 3]
    assert {path.name for path in (tmp_path / "own").iterdir()} == {"LATEST", "step-1", "step-3"}
    assert [row.get("saved", row.get("not_saved")) for row in rows] == [1, 2, 3]
    assert savers[0].key_store.num_keys() == 0


def test_the_last_files_of_a_run_go_elsewhere_together(tmp_path, monkeypatch, capsys) -> None:
    """A folder that is not there refuses like a full disk; metrics that waited come with those that were written."""
    monkeypatch.setattr(fallback_module, "PATIENCE_S", 0.02)
    monkeypatch.setattr(fallback_module, "RETRY_S", 0.01)
    monkeypatch.setattr(fallback_module, "_bases", lambda: [tmp_path / "gone", tmp_path])
    worker, folder = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    worker.add_metrics({"step": 1})
    folder.adopt(worker.pending())
    folder.add_metrics({"step": 2})
    folder.write_model({"w": torch.ones(3)})
    folder.write_last(folder.measured, "{}")
    folder.write_pending()
    (found,) = tmp_path.glob("pipedejavu-run-*")
    assert found.stat().st_mode & 0o777 == 0o700
    assert load_file(folder.place(folder.model))["w"].tolist() == [1.0] * 3
    assert (found / "measured.json").read_text() == "{}"
    assert [row["step"] for row in folder.rows()] == [1, 2]
    assert folder.fallback.describe() == (
        f"the disk of {tmp_path / 'run'} takes no more: model.safetensors, measured.json, metrics.jsonl went to"
        f" {found}; make room, and move them back"
    )
    err = capsys.readouterr().err
    assert err.count("trying again") == 1
    assert "model.safetensors could not be written (" in err


def test_what_fits_nowhere_is_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(fallback_module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100, 100, 0))
    said = r"cannot write .*model\.safetensors: .+; nor elsewhere: no folder has 8 B free: .+; make room, and go"
    with pytest.raises(InputError, match=said):
        RunFolder(tmp_path / "gone").write_model({"w": torch.zeros(2)})


def test_a_run_that_does_not_fit_on_its_disk_is_not_begun(tmp_path, monkeypatch) -> None:
    """Weights of 4 MiB with two moments: a checkpoint of 12 MiB, a result of 4 MiB."""
    model = profile([1e-3, 1e-3], weights=2 * MIB)
    told, folder = list[str](), RunFolder(tmp_path / "a" / "run")

    def check(free: float, saves: bool = True) -> list[str]:
        told.clear()
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100 * MIB, 0, int(free)))
        check_disk_space(folder, model, saves, told.append)
        return told

    said = (
        r"run needs 16\.0 MiB on its disk \(a checkpoint of 12\.0 MiB and the result of 4\.0 MiB\), and 15\.9 MiB are"
        r" free; make room, or choose another --run-dir$"
    )
    with pytest.raises(InputError, match=said):
        check(15.9 * MIB)
    assert check(52 * MIB) == []
    assert check(51.9 * MIB) == [
        f"keeping 3 checkpoints in {folder.path} while another one is written takes 52.0 MiB more, and 51.9 MiB are"
        " free: later ones may not be saved; make room, or choose another --run-dir"
    ]
    for step in (1, 2):
        folder.checkpoint_dir.folder(step).mkdir(parents=True)
    assert check(28 * MIB) == []
    assert check(4 * MIB, saves=False) == []
    with pytest.raises(InputError, match=r"needs 4\.0 MiB on its disk \(its result\), and 3\.0 MiB are free"):
        check(3 * MIB, saves=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 0))  # a file system that does not say
    check_disk_space(folder, model, True, pytest.fail)


def test_metrics_that_wait_for_a_disk_that_does_not_answer_hold_up_nothing_else(tmp_path, monkeypatch) -> None:
    """While a write of metrics waits, reports and the other threads of a rank go on; the user is told."""
    append, answers = folder_module.append_metrics, threading.Event()

    def wait(path: Path, data: bytes) -> None:
        assert answers.wait(60)
        append(path, data)

    monkeypatch.setattr(folder_module, "append_metrics", wait)
    monkeypatch.setattr(rank_monitor, "SLOW_S", 0.1)
    folder, store, told = RunFolder(tmp_path), HashStore(), queue.Queue[str]()
    stop_signal = StopSignal(PrefixStore("halt", store), 0, 1)
    log = Log()
    with Progress(4, "samples", 1.0) as progress:
        collector = MetricsCollector(folder, progress, Logbooks({}, print), num_ranks=1, update_size=1, num_samples=1)
        watch = MetricsReporter(store, 0, Ones(), torch.device("cpu"), collector)
        with watch, RankMonitor(stop_signal, folder, told.put):
            watch.follow(log)
            log.losses[0] = 1.0
            assert re.search(r"the disk of .* has not answered for \d+ s; training goes on", told.get(timeout=60))
            folder.add_metrics({"step": 2})  # returns, though the disk still does not answer
            stop_signal.asked.set()
            last_s, sent = time.monotonic() + 60, watch._number
            while watch._number < sent + 2 or not store.check(["halt/asked"]):
                assert time.monotonic() < last_s
                time.sleep(0.01)
            assert folder.stuck_s() > 0
            answers.set()
    assert [row["step"] for row in folder.rows()] == [1, 2]
    assert folder.stuck_s() == 0
