"""`train` and `plan --steps` say how long the whole job takes, and learn from jobs that have ended."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.run import JobRecord
from tests.cli.test_main import run

TRAIN = (
    "train", "zoo:mlp", "--plan", "preset:ddp", "--workers", "1", "--samples", "4", "--microbatches", "2", "--devices",
    "cpu", "--measure-budget", "0",
)  # fmt: skip


def test_a_second_job_learns_from_the_first(tmp_path: Path) -> None:
    first = run(*TRAIN, "--steps", "5", "--run-dir", str(tmp_path / "a"))
    assert "(no earlier run on these devices to learn from)" in first.stderr
    second = run(*TRAIN, "--steps", "9", "--run-dir", str(tmp_path / "b"))
    records = [JobRecord.load(tmp_path / name / "forecast.json") for name in "ab"]
    assert [record.chance.num_runs for record in records] == [0, 1]
    chance = records[1].chance
    said = f"the whole job: {chance} (learned from 1 earlier run on these devices)"
    assert said in second.stderr
    assert f"with start and end {records[1]}" in (tmp_path / "b" / "report.html").read_text()
    assert records[1].measured_step_s is not None
    assert records[1].measured_s is not None
    assert records[1].measured_s > 9 * records[1].measured_step_s
    # The rest of a run is a job of its own.
    third = run(*TRAIN, "--steps", "12", "--run-dir", str(tmp_path / "b"), "--resume")
    assert "learned from 2 earlier runs" in third.stderr
    assert JobRecord.load(tmp_path / "b" / "forecast.json").steps == 3


def test_a_plan_with_a_number_of_updates_has_a_time() -> None:
    words = ("plan", "gpt:4x256x4", "--machine", "2xa100", "--batch", "32", "--json")
    assert json.loads(run(*words).stdout)["job"] is None
    form = json.loads(run(*words, "--steps", "100000").stdout)
    best = form["candidates"][0]
    assert form["job"]["low_s"] < 1e5 * best["time_s"] < form["job"]["high_s"]
    assert any("the whole job: " in note and "(once train has measured the model" in note for note in form["notes"])
