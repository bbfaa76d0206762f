"""Runs whose processes torchrun starts: on one host, and on two that share no file."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file

from pipedejavu.plan import preset
from tests.processes import ROOT

COMMAND = (sys.executable, "-m", "pipedejavu", "train")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
SMALL = ("zoo:mlp", "--data", "random:64", "--samples", "3", "--steps", "3", "--optimizer", "sgd", "--lr", "0.01")
TRAIN = ("-m", "pipedejavu", "train", *SMALL)
LEFT = {
    "checkpoints", "forecast.json", "lock", "machine.json", "measured.json", "metrics.jsonl", "model.safetensors",
    "options.json", "plan.json", "predicted.json", "profile.json", "report.html", "run.toml", "seal.json",
}  # fmt: skip


def check_run(form: dict, folder: Path, workers: int) -> None:
    assert form["steps"] == 3
    assert form["audit"]["largest_difference"] < 1e-6  # weights below 1 in float32, against a float64 replay
    assert {path.name for path in folder.iterdir()} == LEFT
    measured = json.loads((folder / "measured.json").read_text())
    assert len(measured["workers"]) == workers
    assert set(measured["worker"]) == set(range(workers))


def test_ranks_of_one_host_train_and_take_their_number_from_torchrun(tmp_path: Path, processes) -> None:
    plan = ("--plan", "preset:1f1b", "--microbatches", "4", "--audit", "--json", "--run-dir", "run")
    code, out, err = processes.run((*TORCHRUN, "--nproc-per-node", "2", *TRAIN, *plan), tmp_path)
    assert code == 0, err
    assert out.count("\n") == 1  # the first rank alone prints
    check_run(json.loads(out), tmp_path / "run", workers=2)


@pytest.mark.slow
def test_ranks_of_one_host_share_weights(tmp_path: Path, processes) -> None:
    plan = ("--plan", "preset:hogwild", "--json", "--run-dir", "run")
    code, out, err = processes.run((*TORCHRUN, "--nproc-per-node", "2", *TRAIN, *plan), tmp_path)
    assert code == 0, err
    assert json.loads(out)["steps"] == 3


def test_another_number_of_workers_is_refused_once(tmp_path: Path, processes) -> None:
    plan = ("--plan", "preset:1f1b", "--workers", "3")
    code, _, err = processes.run((*TORCHRUN, "--nproc-per-node", "2", *TRAIN, *plan), tmp_path)
    assert code == 1
    sentence = "pipedejavu: plan '1f1b' has 3 workers and torchrun started 2 processes; start one for each worker"
    assert err.count(sentence) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use_is_named(tmp_path: Path, processes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        code, _, err = processes.run((*COMMAND, *SMALL), tmp_path, **alone)
    assert code == 2
    assert err == f"pipedejavu: the port of 127.0.0.1:{port} is in use; set MASTER_PORT to a free one\n"


def test_half_an_environment_is_refused(tmp_path: Path, processes) -> None:
    code, _, err = processes.run((*COMMAND, *SMALL), tmp_path, RANK="0", WORLD_SIZE="2")
    assert code == 2
    assert err == (
        "pipedejavu: RANK and WORLD_SIZE are set, but MASTER_ADDR and MASTER_PORT not; start ranks with torchrun\n"
    )


def test_ranks_that_cannot_connect_are_told_of_the_interface_once(tmp_path: Path, processes) -> None:
    torchrun = (*TORCHRUN, "--nproc-per-node", "2", *TRAIN, "--plan", "preset:1f1b")
    code, _, err = processes.run(torchrun, tmp_path, GLOO_SOCKET_IFNAME="none0")
    assert code == 1
    said = [line for line in err.splitlines() if line.startswith("pipedejavu: ")]
    assert len(said) == 1
    assert said[0].startswith("pipedejavu: ranks that have met cannot connect to each other: ")
    assert said[0].endswith(
        "(GLOO_SOCKET_IFNAME is 'none0'; set it, on each host, to the network interface that leads to the others)"
    )


def start_on_hosts(processes, folder: Path, two_hosts, command: tuple[str, ...]) -> list[subprocess.Popen[str]]:
    """Starts two ranks on each of two hosts; each host has a folder of its own, named like it."""
    names, address = two_hosts
    started = []
    for n, name in enumerate(names):
        (folder / name).mkdir(exist_ok=True)
        hosts = ("--nnodes", "2", "--node-rank", str(n), "--nproc-per-node", "2", "--master-addr", address)
        torchrun = ("ip", "netns", "exec", name, *TORCHRUN, *hosts, "--master-port", "29611")
        started.append(processes.start((*torchrun, *command), folder / name, is_leader=True, GLOO_SOCKET_IFNAME=name))
    return started


def test_two_hosts_train_a_pipeline_with_replicas_and_share_no_folder(tmp_path: Path, processes, two_hosts) -> None:
    first, second = (tmp_path / name for name in two_hosts[0])
    first.mkdir()
    preset("1f1b").at(workers=2, replicas=2, microbatches=2).save(first / "plan.json")
    plan = ("--plan", "plan.json", "--audit", "--json", "--run-dir", "run")
    started = start_on_hosts(processes, tmp_path, two_hosts, (*TRAIN, *plan))
    (code, out, err), (other_code, other_out, other_err) = [processes.finish(p) for p in started]
    assert code == 0, err
    assert other_code == 0, other_err
    assert other_out == ""
    check_run(json.loads(out), first / "run", workers=4)
    assert list(second.iterdir()) == []
    machine = json.loads((first / "run" / "machine.json").read_text())
    assert len(machine["hosts"]) == 2


@pytest.mark.slow
def test_a_host_adds_its_own_gradients_before_a_helper_on_another_host_sums(tmp_path, processes, two_hosts) -> None:
    """Two replicas on the first host, and one with the helper on the second."""
    first = tmp_path / two_hosts[0][0]
    first.mkdir()
    preset("byteps").at(workers=3, microbatches=1).save(first / "plan.json")
    plan = ("--plan", "plan.json", "--audit", "--json", "--run-dir", "run")
    started = start_on_hosts(processes, tmp_path, two_hosts, (*TRAIN, *plan))
    (code, out, err), (other_code, _, other_err) = [processes.finish(p) for p in started]
    assert code == 0, err
    assert other_code == 0, other_err
    check_run(json.loads(out), first / "run", workers=4)


def test_two_hosts_have_nothing_in_common_but_the_cable(two_hosts) -> None:
    names, address = two_hosts
    with socket.create_server(("127.0.0.1", 0)) as server:
        ask = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)"
        for name in names:
            done = subprocess.run(["ip", "netns", "exec", name, sys.executable, "-c", ask], capture_output=True)
            assert b"Connection refused" in done.stderr  # loopback is each host's own
    reach = ["ip", "netns", "exec", names[1], "ip", "route", "get", address]
    assert names[1] in subprocess.run(reach, capture_output=True, text=True, check=True).stdout
    subprocess.run(["ip", "-n", names[1], "link", "set", names[1], "down"], check=True)
    assert b"unreachable" in subprocess.run(reach, capture_output=True).stderr


@pytest.mark.parametrize(
    ("fault", "dead", "sentence"),
    [
        ("killed", 1, "the connection to another rank is lost; see what that one or its host says"),
        pytest.param(
            "killed", 0, "the connection to another rank is lost; see what that one or its host says",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "cut off", 1, r"rank {} was not heard for 5 s: its host or the network to it is gone; it was at .+",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_lost_host_ends_the_other_with_one_sentence(
    tmp_path: Path, processes, two_hosts, fault: str, dead: int, sentence: str
) -> None:
    names, _ = two_hosts
    sizes = ("--workers", "2", "--replicas", "2", "--microbatches", "2", "--steps", "100000", "--run-dir", "run")
    # A killed host is noticed by its connections, however slow the machine; one that is cut off, by its silence alone.
    command = (*TRAIN, "--plan", "preset:1f1b", *sizes, "--hang-after", "60" if fault == "killed" else "5")
    started = start_on_hosts(processes, tmp_path, two_hosts, command)
    metrics = tmp_path / names[0] / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > 2) and started[0].poll() is None:
        time.sleep(0.05)
    if fault == "killed":
        os.killpg(started[dead].pid, signal.SIGKILL)
        for pid in pids_on(names[dead]):  # torchrun's workers have sessions of their own
            os.kill(pid, signal.SIGKILL)
    else:
        subprocess.run(["ip", "-n", names[dead], "link", "set", names[dead], "down"], check=True)
    ends = "the ranks of host '{}' stop, and the run folder keeps the metrics so far"
    for host in {1 - dead} if fault == "killed" else {0, 1}:
        code, out, err = processes.finish(started[host])
        assert (code, out) == (1, "")
        if host == 0:
            one_host = "shared-memory (the ranks are processes of one host and are not all on GPUs)"
            assert f"wires: {one_host}; gloo (the ranks are not processes of one host)" in err
        said = [line for line in err.splitlines() if line.startswith("pipedejavu: ")]
        # Ranks 2 and 3 went together, and either may be missed first; on their side it is the first rank.
        missed = "0" if host == dead else "[23]"
        end = ends.format(re.escape(f"{socket.gethostname()}-{host}"))
        assert len(said) == 1
        assert re.fullmatch(f"pipedejavu: {sentence.format(missed)}; {end}", said[0])
        assert str(ROOT / "src") not in err  # torchrun shows a traceback of its own, and that is all
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row["step"] for row in rows if "step" in row]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 2


def pids_on(name: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True)
    return [int(pid) for pid in found.stdout.split()]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_run_whose_cable_was_cut_continues_from_its_last_checkpoint(
    tmp_path: Path, processes, two_hosts, seed
) -> None:
    (name, other), _ = two_hosts
    sizes = ("--workers", "2", "--replicas", "2", "--microbatches", "2", "--steps", "40", "--checkpoint-every", "5")
    more = ("--run-dir", str(tmp_path / "run"), "--hang-after", "5", "--resume")  # a folder that both hosts see
    command = (*TRAIN, "--plan", "preset:1f1b", *sizes, *more)
    luck = random.Random(seed)
    at, cut = luck.randrange(6, 30), luck.choice((name, other))
    started = start_on_hosts(processes, tmp_path, two_hosts, command)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count('"loss"') >= at) and started[0].poll() is None:
        time.sleep(0.005)
    subprocess.run(["ip", "-n", cut, "link", "set", cut, "down"], check=True)
    for process in started:
        code, out, err = processes.finish(process)
        assert (code, out) == (1, "")
        said = [line for line in err.splitlines() if " was not heard for 5 s: its host or the network to it" in line]
        assert len(said) == 1
        saved = re.search(r"; --resume goes on after step (\d+)$", said[0])
        assert saved
    subprocess.run(["ip", "-n", cut, "link", "set", cut, "up"], check=True)
    for process in start_on_hosts(processes, tmp_path, two_hosts, command):
        code, _, err = processes.finish(process)
        assert code == 0, err
    assert f'{{"resumed": {saved[1]}}}' in metrics.read_text()
    assert [row["step"] for row in rows_of(metrics) if "step" in row] == list(range(1, 41))
    undisturbed = ("--workers", "2", "--replicas", "2", "--microbatches", "2", "--steps", "40", "--run-dir", "alone")
    code, _, err = processes.run((*COMMAND, *SMALL, "--plan", "preset:1f1b", *undisturbed), tmp_path)
    assert code == 0, err
    ends = [load_file(tmp_path / folder / "model.safetensors") for folder in ("run", "alone")]
    assert all(torch.equal(weight, ends[1][key]) for key, weight in ends[0].items())


def rows_of(metrics: Path) -> list[dict]:
    return [json.loads(line) for line in metrics.read_text().splitlines()]
