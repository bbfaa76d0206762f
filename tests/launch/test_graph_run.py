"""Graph networks in processes of their own: shares and threads that move, and a replay that holds."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from pipedejavu.launch import audit_run, launch, plan_run, train
from pipedejavu.plan import preset
from pipedejavu.run import TrainOptions

MOVING = """
from pipedejavu.launch import worker
from pipedejavu.source import host_threads

def work(rank, size, launched):
    worker.num_cores = lambda: 8
    worker.adjusted_counts = lambda counts, times, bounds: (20, 12)
    host_threads.adjusted_threads = lambda threads, times: (3, 2, 2, 1) if min(times) > 0 else tuple(threads)
    worker.work(rank, size, launched)
"""


def test_shares_and_threads_move_and_the_replay_holds(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "moving_threads.py").write_text(MOVING)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(launch, "work", __import__("moving_threads").work)
    given = TrainOptions(
        model="sage", data="graph:power:10000", fanout="3,2", dtype="float64", keeps_log=True, steps=4, optimizer="sgd"
    )
    plan = preset("hyscale").at(workers=1, samples=32, microbatches=1)
    plan = plan.replace(feed=plan.feed.replace(shares=(0.5, 0.5)))
    options, program, _ = plan_run(given, plan)
    done = train(options, program, str(tmp_path / "run"))
    assert max(audit_run(done).values()) < 1e-12
    rows = [json.loads(line) for line in done.folder.metrics.read_text().splitlines()]
    assert [row["shares"] for row in rows if "shares" in row] == [[20 / 32, 12 / 32]]
    table = "loader of worker 0 3, loader of worker 1 2, trainer of worker 0 2, trainer of worker 1 1"
    assert [row["threads"] for row in rows if "threads" in row] == [table]
