"""Runs whose number of processes changes: how they meet, what they are planned for, and what they end with."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file
from torch.distributed import HashStore

from pipedejavu.facts import InputError
from pipedejavu.launch import fit_plan
from pipedejavu.launch.resume import Known
from pipedejavu.plan import Plan, preset
from pipedejavu.planner.worker_host import WorkerHost, make_machine
from pipedejavu.program import compile as compile_plan
from pipedejavu.run import TrainOptions
from pipedejavu.session.rank_group import meet
from tests.planner.test_replan import reference
from tests.search.case import profile

MODEL = TrainOptions(model="mlp", data="random:64", optimizer="sgd", lr=0.01, steps=200, dtype="float64")


def worker_hosts(count: int) -> list[WorkerHost]:
    return [WorkerHost(host="a", local_rank=n, cores=4, memory_bytes=2**34, gpus=()) for n in range(count)]


def known(plan: Plan, kind: str = "cpu") -> Known:
    plan, machine = make_machine(plan, worker_hosts(plan.num_workers), "cpu")
    machine = machine.replace(devices=tuple(device.replace(kind=kind) for device in machine.devices))
    return Known(MODEL, plan, profile([1e-2] * 4, {kind: 1.0}), machine)


def batch_of(plan: Plan, like: Known) -> int:
    plan, machine = make_machine(plan, worker_hosts(plan.num_workers), "cpu")
    return sum(compile_plan(plan, profile([1e-2] * 4, {"cpu": 1.0}), machine, fold=False).sizes)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
def test_every_number_of_workers_gets_a_plan_that_keeps_the_batch(count: int) -> None:
    run = known(preset("ddp").at(workers=3, microbatches=2, samples=4))
    found = fit_plan(run, None, worker_hosts(count), "cpu")
    assert found.num_workers == count
    assert batch_of(found, run) == 24


@pytest.mark.parametrize(("name", "workers"), [("1f1b", 2), ("coarse", 1)])
def test_the_plan_that_was_asked_for_comes_first_where_it_keeps_the_batch(name: str, workers: int) -> None:
    run = known(preset("1f1b").at(workers=3, microbatches=6, samples=4))
    asked = preset(name).at(workers=workers, microbatches=6, samples=4)
    assert fit_plan(run, asked, worker_hosts(2), "cpu") == asked
    smaller = preset("ddp").at(workers=2, microbatches=1, samples=4)
    assert batch_of(fit_plan(run, smaller, worker_hosts(2), "cpu"), run) == 24


def test_devices_that_were_not_measured_are_data_parallel() -> None:
    run = known(preset("ddp").at(workers=3, microbatches=2, samples=4), kind="other")
    found = fit_plan(run, None, worker_hosts(2), "cpu")
    assert (found.name, found.feed.microbatches, found.feed.samples) == ("ddp", 3, 4)
    said = "there are 5 processes where the run had 3, and no plan for so many keeps its batch of 24 samples; start a"
    with pytest.raises(InputError, match=said):
        fit_plan(run, None, worker_hosts(5), "cpu")


def test_ranks_meet_in_a_store_that_others_have_used() -> None:
    """Each start has other ranks, some of which have died while they met."""
    store, names = HashStore(), []
    for size in (3, 2, 1, 3):
        store.set("hello/1", f"of one that died before a start of {size}")
        found = [""] * size

        def run(rank: int, size: int = size, found: list[str] = found) -> None:
            time.sleep(0.1 * (rank == 1))  # the first meets the dead one before
            found[rank] = meet(store, rank, size)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({*found}) == 1
        names.append(found[0])
    assert len({*names}) == 4


def start_agent(processes, folder: Path, port: int) -> subprocess.Popen[str]:
    """Starts one host's agent of torchrun with one worker, which waits for others for a while and goes on without."""
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test")
    hosts = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "5", "--monitor-interval", "0.1")
    torchrun = (sys.executable, "-m", "torch.distributed.run", *hosts, *where, "--rdzv-conf", "last_call_timeout=5")
    given = (
        "--dtype",
        "float64",
        "--data",
        "random:64",
        "--optimizer",
        "sgd",
        "--lr",
        "0.01",
        "--samples",
        "6",
        "--steps",
        "200",
    )
    more = ("--plan", "auto", "--no-replan", "--checkpoint-every", "10", "--run-dir", "run", "--resume")
    code = ("slowly.py", "train", "zoo:mlp", *given, *more)
    # Without this an agent that joins later waits in vain for the address of a store that the others have already.
    apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return processes.start((*torchrun, *code), folder, is_leader=True, **apart)


SLOWLY = """
import time
from pipedejavu.cli.main import main
from pipedejavu.launch.worker import Rank

after_round = Rank.after_round

def later(self, *args):
    time.sleep(0.1)
    return after_round(self, *args)

Rank.after_round = later
main()
"""


def rows_of(folder: Path) -> list[dict]:
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_for(folder: Path, agent: subprocess.Popen[str], is_there) -> None:
    """Waits for a row of the metrics; whatever does not come lets the test run into its timeout."""
    while not any(map(is_there, rows_of(folder))):
        assert agent.poll() is None, agent.communicate()
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_host_that_stays_away_and_one_that_returns(tmp_path: Path, processes) -> None:
    (tmp_path / "slowly.py").write_text(SLOWLY)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    first = start_agent(processes, tmp_path, port)
    time.sleep(2)  # the first keeps the meeting place
    second = start_agent(processes, tmp_path, port)
    wait_for(tmp_path, first, lambda row: row.get("saved", 0) >= 10)
    assert Plan.load(tmp_path / "run" / "plan.json").num_workers == 2
    kill_tree(second.pid)
    wait_for(tmp_path, first, lambda row: "switched" in row)
    begun = next(row["switched"] for row in rows_of(tmp_path) if "switched" in row)
    wait_for(tmp_path, first, lambda row: row.get("saved", 0) > begun)
    assert Plan.load(tmp_path / "run" / "plan.json").num_workers == 1
    third = start_agent(processes, tmp_path, port)
    outcomes = [processes.finish(agent) for agent in (first, third)]
    assert [code for code, _, _ in outcomes] == [0, 0], outcomes
    assert Plan.load(tmp_path / "run" / "plan.json").num_workers == 2
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows if "step" in row] == list(range(1, 201))
    fewer, more = (row["reason"] for row in rows if "switched" in row)
    assert fewer.startswith("torchrun started 1 processes where the run had 2 workers: it goes on under plan '")
    assert more.startswith("torchrun started 2 processes where the run had 1 workers: it goes on under plan '")
    expected, found = reference(MODEL), load_file(tmp_path / "run" / "model.safetensors")
    # In float64 rounding is far below what one lost or repeated sample changes (1e-6).
    assert max(float((found[n] - w).abs().max()) for n, w in expected.items()) < 1e-12


def kill_tree(pid: int) -> None:
    """Ends an agent and its workers, which have sessions of their own, at once and for good."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    for child in found.stdout.split():
        kill_tree(int(child))
    os.kill(pid, signal.SIGKILL)
