"""Runs whose processes torchrun starts: on one host, and on two that share no file."""

import json
import socket
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from pipedejavu.plan import preset

COMMAND = (sys.executable, "-m", "pipedejavu", "train")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
SMALL = ("zoo:mlp", "--data", "random:64", "--samples", "3", "--steps", "3", "--optimizer", "sgd", "--lr", "0.01")
TRAIN = ("-m", "pipedejavu", "train", *SMALL)
LEFT = {
    "machine.json", "measured.json", "metrics.jsonl", "model.safetensors", "options.json", "plan.json",
    "predicted.json", "profile.json", "report.html",
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


def test_two_hosts_train_a_pipeline_with_replicas_and_share_no_folder(tmp_path: Path, processes, two_hosts) -> None:
    names, address = two_hosts
    plan = ("--plan", "plan.json", "--audit", "--json")
    started, folders = [], []
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        folders.append(folder)
    preset("1f1b").at(workers=2, replicas=2, microbatches=2).save(folders[0] / "plan.json")
    for n, (name, folder) in enumerate(zip(names, folders, strict=True)):
        hosts = ("--nnodes", "2", "--node-rank", str(n), "--nproc-per-node", "2", "--master-addr", address)
        inside = ("ip", "netns", "exec", name)
        command = (*inside, *TORCHRUN, *hosts, "--master-port", "29611", *TRAIN, *plan, "--run-dir", "run")
        started.append(processes.start(command, folder, GLOO_SOCKET_IFNAME=name))
    (code, out, err), (other_code, other_out, other_err) = [processes.finish(p) for p in started]
    assert code == 0, err
    assert other_code == 0, other_err
    assert other_out == ""
    check_run(json.loads(out), folders[0] / "run", workers=4)
    assert list(folders[1].iterdir()) == []
    machine = json.loads((folders[0] / "run" / "machine.json").read_text())
    assert len(machine["hosts"]) == 2
