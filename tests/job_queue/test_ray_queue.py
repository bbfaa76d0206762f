"""Queues on a local Ray cluster of two nodes with one CPU each: nodes, schedulers and Ray itself are lost."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipedejavu.job_queue import QueueState
from pipedejavu.run import RunFolder
from pipedejavu.run.metrics_file import read_metrics, step_of
from tests.job_queue.test_queue_real import assert_same_bits, finish, write_jobs

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without CPUs, which runs no jobs, and two nodes."""
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        found.add_node(num_cpus=1)
    yield found
    found.shutdown()


def start(jobs: Path, address: str, *options: str) -> subprocess.Popen[str]:
    words = ["schedule", str(jobs), "--run", "--ray", address, "--out", str(jobs.parent / "q"), "--json", *options]
    command = [sys.executable, "-m", "pipedejavu", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_update(folder: Path, done: int = 0) -> None:
    """Waits until a job has made more updates."""
    until_s = time.monotonic() + 120
    while time.monotonic() < until_s:
        if max(map(step_of, read_metrics(folder / "metrics.jsonl")), default=0) > done:
            return
        time.sleep(0.1)
    raise AssertionError(f"no update in {folder} in two minutes")


def node_of(cluster: Any, folder: Path, name: str) -> Any:
    """Returns the node on which a job trains."""
    entries = QueueState.load(folder / "queue.json").entries
    (device,) = next(entry.devices for entry in entries if entry.job.name == name)
    numbers = sorted(node.node_id for node in cluster.worker_nodes)
    return next(node for node in cluster.worker_nodes if node.node_id == numbers[device])


def test_jobs_go_on_after_a_scheduler_and_a_node_are_lost(tmp_path: Path, cluster: Any) -> None:
    jobs = write_jobs(tmp_path, [{"name": "a", "seed": 3, "steps": 400}, {"name": "b", "seed": 4, "steps": 400}])
    finish(jobs, "plain")
    first = start(jobs, cluster.address)
    for name in "ab":
        wait_for_update(tmp_path / "q" / name)
    first.kill()
    first.communicate()
    second = start(jobs, cluster.address)
    cluster.remove_node(node_of(cluster, tmp_path / "q", "a"), allow_graceful=False)
    stdout, stderr = second.communicate(timeout=250)
    assert second.returncode == 0, stderr
    assert "job 'b' still runs as process" in stderr
    assert "Ray has lost job 'a' on node" in stderr
    forms = json.loads(stdout)["jobs"]
    assert [(form["state"], form["steps"], form["num_retries"]) for form in forms] == [("ended", 400, 0)] * 2
    assert_same_bits(jobs, ("plain", "q"), "ab")


def test_the_queue_outlives_ray(tmp_path: Path, cluster: Any) -> None:
    jobs = write_jobs(tmp_path, [{"name": "a", "seed": 3, "steps": 400}])
    process = start(jobs, cluster.address)
    wait_for_update(tmp_path / "q" / "a")
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped with 1 jobs to go on, from their checkpoints" in stderr
    entry = QueueState.load(tmp_path / "q" / "queue.json").entries[0]
    assert entry.state == "waiting"
    assert 0 < entry.steps == max(RunFolder(tmp_path / "q" / "a").checkpoint_dir.steps())
    process = start(jobs, cluster.address)
    wait_for_update(tmp_path / "q" / "a", entry.steps)
    cluster.shutdown()
    stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "does not answer any more; start it again and repeat the command with --out" in stderr, stderr
    assert not stdout
    again = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        last = start(jobs, again.address)
        stdout, stderr = last.communicate(timeout=250)
    finally:
        again.shutdown()
    assert last.returncode == 0, stderr
    assert [(form["state"], form["steps"]) for form in json.loads(stdout)["jobs"]] == [("ended", 400)]
