"""What jobs that have ended leave in the cache."""

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.planner import job_history
from pipedejavu.planner.cache import store_folder
from pipedejavu.planner.job_history import ended_jobs, forecast_like, keep_job, past_jobs
from pipedejavu.run import JobRecord
from pipedejavu.simulate import JobChance, PastJob


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def record(steps: int = 10, devices: str = "cpu", **changes: float | None) -> JobRecord:
    chance = JobChance(time_s=20.0, low_s=15.0, high_s=30.0, deviation_s=5.0)
    fields = {"measured_step_s": 1.5, "measured_s": 20.0, **changes}
    return JobRecord(
        model="mlp", plan="ddp", batch=8, devices=devices, steps=steps, step_s=1.0, scale=0.2, chance=chance,
        **fields,
    )  # fmt: skip


def keep_in_order(*records: JobRecord) -> None:
    for number, each in enumerate(records):
        keep_job(each, "runs/a", number)
        newest = max(store_folder().iterdir(), key=lambda path: path.stat().st_ino)
        os.utime(newest, (number, number))


def test_a_job_teaches_by_how_much_it_deviated_and_what_it_took_beside() -> None:
    keep_job(record(), "runs/a", 1.0)
    assert past_jobs("cpu") == [PastJob(record().key, 1.5, 5.0)]
    assert past_jobs("h200") == []
    assert str(record()) == "20 s (forecast 15 to 30 s)"


def test_a_job_that_was_not_timed_teaches_nothing() -> None:
    keep_job(record(measured_step_s=None), "runs/a", 1.0)
    keep_job(record(measured_s=None), "runs/a", 2.0)
    assert past_jobs("cpu") == []
    assert len(ended_jobs()) == 2


def test_the_newest_count_and_the_oldest_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_history, "MOST_KEPT", 3)
    monkeypatch.setattr(job_history, "MOST_LEARNED", 2)
    keep_in_order(*(record(steps) for steps in range(1, 6)))
    (store_folder() / "jobrecord-broken.json").write_text("{")
    os.utime(store_folder() / "jobrecord-broken.json", (3.5, 3.5))
    assert [job.steps for job in ended_jobs()] == [4, 5]
    assert len(past_jobs("cpu")) == 2
    assert len(list(store_folder().iterdir())) == 3


def test_a_job_that_has_run_is_forecast_from_what_it_took() -> None:
    past = [record(), record(), record()]
    again = forecast_like(record().key, 100, past)
    assert again is not None
    assert (again.steps, again.measured_s, again.chance.num_runs) == (100, None, 3)
    assert 1.35 < again.ratio < 1.5
    assert 135 < again.chance.time_s < 160
    assert forecast_like(record().key._replace(batch=9), 100, past) is None
