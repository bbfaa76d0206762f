"""Whole runs in processes of their own: the command line, torchrun, and hosts made of network namespaces."""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Runs set torch's threads; they are put back."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Processes:
    """Commands that a test starts, each in a folder of its own; none outlives the test."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def start(self, arguments: Sequence[str], cwd: Path, is_leader: bool = False, **more: str) -> subprocess.Popen[str]:
        """Starts a command that finds this checkout, and no launcher's variables but those given.

        A leader has a group of its own for itself and all that it starts.
        """
        launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
        kept = {name: text for name, text in os.environ.items() if name not in launched}
        paths = os.pathsep.join((str(ROOT / "src"), str(cwd)))
        process = subprocess.Popen(
            list(arguments),
            cwd=cwd,
            env={**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **more},
            start_new_session=is_leader,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        """Waits for a process; returns its code and what it printed. One that hangs fails the test."""
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    def run(self, arguments: Sequence[str], cwd: Path, **more: str) -> tuple[int, str, str]:
        """Starts a command and waits for it."""
        return self.finish(self.start(arguments, cwd, **more))


@pytest.fixture
def processes() -> Iterator[Processes]:
    made = Processes()
    yield made
    for process in made.started:
        process.kill()
        process.communicate()


@pytest.fixture
def two_hosts() -> Iterator[tuple[tuple[str, ...], str]]:
    """Makes two network namespaces with a cable between them; yields their names and the first one's address.

    The interface of each has its name.
    """
    names = wires = tuple(f"pdv{os.getpid()}{end}" for end in "ab")
    steps = [["ip", "netns", "add", name] for name in names]
    steps.append(["ip", "link", "add", wires[0], "type", "veth", "peer", "name", wires[1]])
    for n, (name, wire) in enumerate(zip(names, wires, strict=True), start=1):
        steps += [
            ["ip", "link", "set", wire, "netns", name],
            ["ip", "-n", name, "addr", "add", f"10.77.0.{n}/24", "dev", wire],
            ["ip", "-n", name, "link", "set", wire, "up"],
            ["ip", "-n", name, "link", "set", "lo", "up"],
        ]
    try:
        for step in steps:
            try:
                done = subprocess.run(step, capture_output=True, text=True, check=False)
            except FileNotFoundError:
                pytest.skip("there is no 'ip' command to make network namespaces with")
            if done.returncode:
                pytest.skip(f"network namespaces cannot be made here: {done.stderr.strip()}")
        yield names, "10.77.0.1"
    finally:
        for name in names:
            left = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in left.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
