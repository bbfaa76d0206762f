"""Shares that move while a run goes on: what is compared and replayed is what ran."""

import re
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from pipedejavu.plan import preset
from pipedejavu.train import TrainOptions, audit_run, launch, plan_run, train

MOVING = """
from pipedejavu.train import worker

def work(rank, size, path):
    worker.adjusted_counts = lambda counts, times: (1, 2, 5)
    worker.work(rank, size, path)
"""


def test_the_forecast_is_of_the_program_that_ran_last(tmp_path, monkeypatch) -> None:
    (tmp_path / "moving.py").write_text(MOVING)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(launch, "work", __import__("moving").work)
    before = torch.get_default_dtype(), torch.get_num_threads()
    plan = preset("hyscale").at(workers=2, samples=3, microbatches=8)
    options = TrainOptions(model="mlp", data="random:64", dtype="float64", keeps_log=True, steps=3, optimizer="sgd")
    options, program, _ = plan_run(options, plan)
    done = train(options, program, str(tmp_path / "run"))
    assert max(audit_run(done).values()) < 1e-12  # a few units in the last place, for each of the updates
    predicted, measured = (done.folder.timeline(origin) for origin in ("predicted", "measured"))
    assert sorted(predicted.action) == sorted(measured.action)
    forwards = Counter(span.worker for span in measured.spans() if re.match("F[0-9]", span.action))
    assert forwards == {0: 1, 1: 2, 2: 5}
    assert '"shares": [0.125, 0.25, 0.625]' in done.folder.metrics.read_text()
    torch.set_default_dtype(before[0])
    torch.set_num_threads(before[1])
