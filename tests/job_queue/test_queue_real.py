"""Queues of real `train` processes on one or two cores: killed at any time, with the bits of an undisturbed run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipedejavu.job_queue import QueueState

_START = """
import os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:int(sys.argv[1])])
os.execv(sys.executable, [sys.executable, "-m", "pipedejavu", *sys.argv[2:]])
"""
JOBS = [{"name": "a", "seed": 3, "steps": 300}, {"name": "b", "seed": 4, "steps": 8, "arrival_s": 4}]


def write_jobs(folder: Path, jobs: list[dict[str, object]], **others: str) -> Path:
    forms = []
    for job in jobs:
        options = {"seed": job["seed"], "measure_budget_s": 0.0, "checkpoint_every": 20, **others}
        fields = {name: value for name, value in job.items() if name != "seed"}
        forms.append({"model": "zoo:mlp", "batch": 16, **fields, "options": options})
    (folder / "jobs.json").write_text(json.dumps({"jobs": forms}))
    return folder / "jobs.json"


def start(jobs: Path, out: str, *options: str, cores: int = 1) -> subprocess.Popen[str]:
    words = ["schedule", str(jobs), "--run", "--out", str(jobs.parent / out), "--json", *options]
    return subprocess.Popen(
        [sys.executable, "-c", _START, str(cores), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(jobs: Path, out: str, *options: str, cores: int = 1) -> list[dict[str, object]]:
    process = start(jobs, out, *options, cores=cores)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    forms: list[dict[str, object]] = json.loads(stdout)["jobs"]
    return forms


def weights(jobs: Path, out: str, name: str) -> dict[str, torch.Tensor]:
    return load_file(jobs.parent / out / name / "model.safetensors")


def assert_same_bits(jobs: Path, outs: tuple[str, str], names: str) -> None:
    for name in names:
        before, after = (weights(jobs, out, name) for out in outs)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)


def pid_of(folder: Path, name: str) -> int | None:
    """Returns the process of a job once it has made an update."""
    if not (folder / "queue.json").exists() or not (folder / name / "metrics.jsonl").exists():
        return None
    entries = QueueState.load(folder / "queue.json").entries
    return next(entry.pid for entry in entries if entry.job.name == name)


def wait_for_update(folder: Path, name: str) -> int:
    for _ in range(600):
        pid = pid_of(folder, name)
        if pid is not None and '"loss"' in (folder / name / "metrics.jsonl").read_text():
            return pid
        time.sleep(0.1)
    raise AssertionError(f"job '{name}' made no update in a minute")


def test_a_killed_job_goes_on_beside_a_failing_one(tmp_path: Path) -> None:
    """One device: a job that is killed once has all its updates, and one that cannot train is told."""
    broken = {"name": "bad", "seed": 1, "steps": 5, "model": f"{tmp_path}/none.py:make"}
    jobs = write_jobs(tmp_path, [{"name": "a", "seed": 3, "steps": 150}, broken])
    process = start(jobs, "q", "--html", str(tmp_path / "page.html"))
    os.kill(wait_for_update(tmp_path / "q", "a"), signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    first, second = json.loads(stdout)["jobs"]
    assert (first["state"], first["steps"], first["num_retries"]) == ("ended", 150, 1)
    assert (second["state"], second["steps"]) == ("failed", 0)
    assert "job 'a' was killed (SIGKILL); it goes on from its last checkpoint" in stderr
    assert "job 'bad' has failed, exit code 2: " in stderr
    assert str(tmp_path / "q" / "bad.train.log") in stderr
    assert '"core 0"' in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_two_jobs_one_after_the_other_and_preempted_have_the_same_bits(tmp_path: Path) -> None:
    jobs = write_jobs(tmp_path, JOBS)
    plain = finish(jobs, "plain")
    assert [form["num_preemptions"] for form in plain] == [0, 0]
    preempted = finish(jobs, "preempted", "--policy", "srtf", "--round", "1", "--start", "0")
    assert [form["state"] for form in preempted] == ["ended", "ended"]
    assert int(str(preempted[0]["num_preemptions"])) >= 1
    assert_same_bits(jobs, ("plain", "preempted"), "ab")


@pytest.mark.slow
def test_a_scheduler_that_is_killed_goes_on(tmp_path: Path) -> None:
    """The scheduler is killed at random moments, and so is a job; a stop signal ends with its code."""
    jobs, draw = write_jobs(tmp_path, JOBS), random.Random(time.time_ns())
    finish(jobs, "plain")
    options = ("--policy", "srtf", "--round", "3", "--start", "8")
    for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
        process = start(jobs, "killed", *options)
        try:
            process.wait(draw.uniform(1, 12))
        except subprocess.TimeoutExpired:
            process.send_signal(number)
            code = process.wait(100)
            stderr = process.stderr.read() if process.stderr else ""
            assert code in ((-signal.SIGKILL,) if number == signal.SIGKILL else (128 + number, -number, 0)), stderr
        if process.stdout and process.stderr:
            process.stdout.close()
            process.stderr.close()
    forms = finish(jobs, "killed", *options)
    assert [(form["state"], form["steps"]) for form in forms] == [("ended", 300), ("ended", 8)]
    assert_same_bits(jobs, ("plain", "killed"), "ab")


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="an elastic job needs a second core")
def test_a_resized_job_has_the_weights_within_rounding(tmp_path: Path) -> None:
    """It grows to both cores at once and gives one back for the second job; float64 leaves little to rounding."""
    elastic = {"name": "a", "seed": 3, "steps": 400, "most_gpus": 2, "rates": [
        {"gpus": 1, "cores": 0, "steps_per_s": 1}, {"gpus": 2, "cores": 0, "steps_per_s": 2},
    ]}  # fmt: skip
    small = {"name": "b", "seed": 4, "steps": 5, "arrival_s": 20}
    jobs = write_jobs(tmp_path, [elastic, small], precision="fp64")
    finish(jobs, "plain", cores=1)
    forms = finish(jobs, "resized", "--round", "1", "--start", "0", cores=2)
    assert [form["state"] for form in forms] == ["ended", "ended"]
    assert {len(span[2]) for span in forms[0]["spans"]} == {1, 2}  # type: ignore[attr-defined]
    before, after = (weights(jobs, out, "a") for out in ("plain", "resized"))
    for name, weight in before.items():
        assert weight.dtype == torch.float64
        assert float((after[name] - weight).abs().max()) < 1e-12, name
