"""What strangers can reach: nothing that arrives is executed, and sockets stay on loopback."""

import ast
import ipaddress
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import processes  # noqa: F401

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml", "xmlrpc", "rpc"}
FORBIDDEN_NAMES = {
    "eval", "exec", "broadcast_object_list", "scatter_object_list", "all_gather_object", "gather_object",
    "send_object_list", "recv_object_list", "Listener", "BaseManager",
}  # fmt: skip
ALLOWED = {("store/foreign.py", "pickle")}
"""Its reader knows the records of torch.distributed.checkpoint and refuses all else; a caller must ask for it."""


def faults_of(text: str) -> Iterator[str]:
    """Yields what a source does that could execute what it reads."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if FORBIDDEN_MODULES & {*a.name.split(".")})
        elif isinstance(node, ast.ImportFrom):
            names = {*(node.module or "").split("."), *(a.name for a in node.names)}
            yield from sorted(names & (FORBIDDEN_MODULES | FORBIDDEN_NAMES))
        elif isinstance(node, ast.Call):
            yield from _faults_of_call(node)


def _faults_of_call(call: ast.Call) -> Iterator[str]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = ast.unparse(call.func).rpartition(".")[0]
    keywords = {k.arg: k.value for k in call.keywords}
    if name in FORBIDDEN_NAMES and owner in ("", "dist", "torch.distributed", "builtins"):
        yield name
    if (owner, name) == ("torch", "load") and getattr(keywords.get("weights_only"), "value", None) is not True:
        yield "torch.load without weights_only"
    if getattr(keywords.get("shell"), "value", False) is not False:
        yield "a shell"
    if getattr(keywords.get("trust_remote_code"), "value", False) is not False:
        yield "remote code"
    if getattr(keywords.get("allow_pickle"), "value", False) is not False:
        yield "allow_pickle"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_that_is_read_or_received_is_executed(path: Path) -> None:
    room = str(path.relative_to(ROOT / "src" / "pipedejavu"))
    assert [fault for fault in faults_of(path.read_text()) if (room, fault) not in ALLOWED] == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("import pickle", "pickle"),
        ("from torch.distributed import rpc", "rpc"),
        ("dist.broadcast_object_list(x)", "broadcast_object_list"),
        ("from torch.distributed import all_gather_object", "all_gather_object"),
        ("torch.load(f)", "torch.load without weights_only"),
        ("torch.load(f, weights_only=False)", "torch.load without weights_only"),
        ("eval(text)", "eval"),
        ("run(command, shell=True)", "a shell"),
        ("import_dcp(a, b, allow_pickle=True)", "allow_pickle"),
        ("numpy.load(f, allow_pickle=flag)", None),
        ("model.eval()", None),
        ("torch.load(f, weights_only=True)", None),
    ],
)
def test_the_look_finds_what_it_looks_for(text: str, fault: str | None) -> None:
    assert [*faults_of(text)] == ([fault] if fault else [])


def listening(pid: int) -> set[tuple[str, int]]:
    """Returns the addresses and ports that a process listens at."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        target = str(entry.readlink())
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                raw = bytes.fromhex(address)
                words = [raw[n : n + 4][::-1] for n in range(0, len(raw), 4)]  # each in the order of this machine
                found.add((str(ipaddress.ip_address(b"".join(words))), int(port, 16)))
    return found


def tree(pid: int) -> list[int]:
    """Returns a process and all that it has started."""
    try:
        below = [int(n) for t in Path(f"/proc/{pid}/task").iterdir() for n in (t / "children").read_text().split()]
    except OSError:
        return []
    return [pid, *(found for child in below for found in tree(child))]


def test_a_run_listens_on_loopback_only_and_drops_what_is_not_its_own(processes, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("torch")
    command = ("train", "zoo:mlp", "--data", "random:64", "--samples", "3", "--plan", "preset:ddp", "--workers", "2")
    process = processes.start(
        (sys.executable, "-m", "pipedejavu", *command, "--steps", "100000", "--run-dir", "run"), tmp_path
    )
    metrics, found = tmp_path / "run" / "metrics.jsonl", set[tuple[str, int]]()

    def num_lines() -> int:
        return metrics.read_text().count("\n") if metrics.exists() else 0

    while process.poll() is None and num_lines() < 3:
        for pid in tree(process.pid):
            try:
                found |= listening(pid)
            except OSError:  # it is gone
                continue
        time.sleep(0.02)
    assert process.poll() is None
    for pid in tree(process.pid):
        found |= listening(pid)
    assert found
    assert all(ipaddress.ip_address(address).is_loopback for address, _ in found), found
    store = listening(process.pid)  # the launcher's
    assert len(store) == 1
    with socket.create_connection(store.pop()) as stranger:
        stranger.sendall(bytes(range(256)) * 64)
        before = num_lines()
        while process.poll() is None and num_lines() < before + 5:
            time.sleep(0.02)
    assert process.poll() is None


def test_hosts_beyond_loopback_need_an_interface_that_was_named(processes, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("torch")
    several = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}
    kept = {**several, "GLOO_SOCKET_IFNAME": ""}
    code, _, err = processes.run((sys.executable, "-m", "pipedejavu", "train", "zoo:mlp"), tmp_path, **kept)
    assert code == 2
    assert err == (
        "pipedejavu: 2 ranks are not all on this host, and what passes between them is neither encrypted nor"
        " authenticated; set GLOO_SOCKET_IFNAME, on each host, to the interface of a network that you trust\n"
    )
