"""Hosts for the bench of faults: two network namespaces with a cable between them, and agents that come and go.

`faults` injects what happens to them; here is only how they are made and ended.
"""

import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

Process = subprocess.Popen[str]
_numbers = itertools.count()
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


class Hosts:
    """Two hosts that can be reached at 10.78.0.1 and 10.78.0.2; the interface of each has its name."""

    def __init__(self) -> None:
        number = next(_numbers)
        self.names = tuple(f"pf{os.getpid()}n{number}{end}" for end in "ab")  # at most 15 characters

    def launcher(self, number: int, processes: int = 1) -> tuple[str, ...]:
        """Returns what starts the ranks of one host with torchrun."""
        hosts = ("--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", str(processes))
        where = ("--master-addr", "10.78.0.1", "--master-port", "29612")
        return ("ip", "netns", "exec", self.names[number], *TORCHRUN, *hosts, *where)

    def pull(self, number: int) -> None:
        """Pulls one host's cable."""
        self._set(number, "down")

    def plug(self, number: int) -> None:
        """Plugs it in again."""
        self._set(number, "up")

    def _set(self, number: int, state: str) -> None:
        name = self.names[number]
        subprocess.run(["ip", "-n", name, "link", "set", name, state], check=True)


@contextmanager
def two_hosts() -> Iterator[Hosts | None]:
    """Makes two hosts, or none where that is not allowed; whatever runs there is ended with them."""
    hosts = Hosts()
    first, second = hosts.names
    steps = [["ip", "netns", "add", name] for name in hosts.names]
    steps.append(["ip", "link", "add", first, "netns", first, "type", "veth", "peer", "name", second, "netns", second])
    for n, name in enumerate(hosts.names, start=1):
        steps.append(["ip", "-n", name, "addr", "add", f"10.78.0.{n}/24", "dev", name])
        steps += [["ip", "-n", name, "link", "set", link, "up"] for link in (name, "lo")]
    try:
        made = all(subprocess.run(step, capture_output=True, check=False).returncode == 0 for step in steps)
        yield hosts if made else None
    except FileNotFoundError:  # there is no ip
        yield None
    finally:
        with suppress(FileNotFoundError):
            for name in hosts.names:
                found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
                for pid in found.stdout.split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


class Agents:
    """Agents of torchrun, one worker each, that train with as many as are there."""

    def __init__(self, folder: Path, command: tuple[str, ...], environment: dict[str, str]):
        self.folder, self.command, self.environment = folder, command, environment
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
        self.started: list[Process] = []

    def start(self) -> Process:
        """Starts one, which waits for others for a while and goes on without."""
        where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "faults")
        hosts = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "5", "--monitor-interval", "0.1")
        # Without this an agent that joins later waits in vain for the address of a store that the others have already.
        apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        process = subprocess.Popen(
            [*TORCHRUN, *hosts, *where, "--rdzv-conf", "last_call_timeout=5", *self.command],
            cwd=self.folder, env={**self.environment, **apart}, text=True, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.started.append(process)
        return process

    def end(self) -> None:
        """Ends all that are left."""
        for process in self.started:
            if process.poll() is None:
                kill_tree(process.pid)
            process.communicate()


def kill_tree(pid: int) -> None:
    """Ends an agent and its workers, which have sessions of their own, at once and for good."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    for child in found.stdout.split():
        kill_tree(int(child))
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
