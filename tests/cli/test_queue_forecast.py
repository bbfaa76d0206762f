"""Rates and forecasts of a queue from earlier jobs."""

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.cli.queue_forecast import QueueForecast
from pipedejavu.cluster import ClusterJob, RateRow
from pipedejavu.planner.job_history import keep_job
from pipedejavu.run import JobRecord
from pipedejavu.simulate import JobChance


def keep_run(model: str, workers: int, step_s: float) -> None:
    chance = JobChance(time_s=1.0, low_s=1.0, high_s=1.0, deviation_s=0.0)
    record = JobRecord(
        model=model, plan=f"ddp, {workers} workers", batch=8, devices=f"{workers} cores", steps=10, step_s=step_s,
        scale=0.2, chance=chance, measured_step_s=step_s, measured_s=10 * step_s + 4,
    )  # fmt: skip
    keep_job(record, model, workers)


def rates(job: ClusterJob) -> list[tuple[float, float]]:
    return [(row.gpus, round(row.steps_per_s, 6)) for row in job.rates]


def test_jobs_are_as_fast_as_they_were() -> None:
    job = ClusterJob(name="a", model="zoo:mlp", batch=8, steps=100, most_gpus=2)
    elastic, new = job, job.replace(name="b", model="zoo:resnet18", most_gpus=None)
    own = job.replace(name="c", rates=(RateRow(gpus=1, cores=0, steps_per_s=9.0),))
    nothing = QueueForecast()
    assert [rates(each) for each in nothing.with_rates((elastic, new))] == [[(1, 1.0), (2, 2.0)], [(1, 1.0)]]
    assert nothing.chances((elastic, new)) == {}
    keep_run("mlp", 1, 0.25)
    one = QueueForecast()
    assert [rates(each) for each in one.with_rates((elastic, new, own))] == [
        [(1, 4.0), (2, 8.0)],
        [(1, 4.0)],
        [(1, 9.0)],
    ]
    keep_run("mlp", 2, 0.2)
    both = QueueForecast()
    assert rates(both.with_rates((elastic,))[0]) == [(1, 4.0), (2, 5.0)]
    chances = both.chances((elastic, new))
    assert chances.keys() == {"a"}
    assert chances["a"].low_s < 100 * 0.25 + 4 < chances["a"].high_s
