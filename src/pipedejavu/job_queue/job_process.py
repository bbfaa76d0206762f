"""Processes of `train`, one per running job: started on a job's devices, found again, stopped, and waited for.

A process is known by its run folder, which stands on its command line: pids are used again, and a scheduler may end
before it has noted one.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pipedejavu.cluster import ClusterJob
from pipedejavu.facts import InputError, write_file
from pipedejavu.job_queue.local_devices import LocalDevice
from pipedejavu.run.metrics_file import read_metrics, step_of
from pipedejavu.run.run_folder import RunFolder

_LOG = "train.log"


def config_of(job: ClusterJob) -> str:
    """Returns the run.toml of a job: its model, its updates and its options, without the sizes of its plan."""
    values = {"model": job.model, "plan": "preset:ddp", "steps": round(job.work)}
    values |= {name: value for name, value in job.options.items() if name != "microbatches"}
    return "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items())


def sizes_of(job: ClusterJob, workers: int) -> list[str]:
    """Returns the options for a number of data-parallel workers, which share the job's batch evenly."""
    split = int(job.options.get("microbatches", 1))
    return [f"--workers={workers}", f"--microbatches={split}", f"--samples={job.batch // (workers * split)}"]


class JobProcesses:
    """The processes of the jobs of a queue."""

    def __init__(self, folder: Path, devices: Sequence[LocalDevice]):
        self.folder, self.devices = folder.resolve(), list(devices)
        self.stop_number = 0
        """The signal that stops the queue; 0 as long as none has come."""
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._pidfds: dict[str, int] = {}
        self._wakes: int | None = None

    def run_folder(self, name: str) -> Path:
        """Returns the run folder of a job."""
        return self.folder / name

    def log_of(self, name: str) -> Path:
        """Returns the file with a job's output."""
        return self.folder / f"{name}.{_LOG}"

    def command(self, job: ClusterJob, workers: int) -> list[str]:
        """Returns what Python runs to start or continue a job, and writes the job's configuration."""
        config, run_dir = self.folder / f"{job.name}.toml", self.run_folder(job.name)
        write_file(config, config_of(job))
        words = ["-m", "pipedejavu", "train", "--config", str(config), *sizes_of(job, workers)]
        return [*words, "--run-dir", str(run_dir), "--resume"]

    def lost(self) -> frozenset[int]:
        """Returns the numbers of servers that are gone."""
        return frozenset()

    def devices_of(self, _: str) -> tuple[int, ...]:
        """Returns the devices of a process that was adopted, if it can tell."""
        return ()

    def start(self, job: ClusterJob, devices: Sequence[int]) -> int | None:
        """Starts or continues a job on some devices; returns the process, if that is known at once."""
        held = [self.devices[number] for number in devices]
        gpus = ",".join(device.gpu for device in held if device.gpu is not None)
        command = [sys.executable, *self.command(job, len(held))]
        before = os.sched_getaffinity(0)
        with self.log_of(job.name).open("ab") as log:
            os.sched_setaffinity(0, {core for device in held for core in device.cores})  # the child inherits it
            try:
                child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": gpus},
                )  # fmt: skip
            except OSError as error:
                raise InputError(f"cannot start job '{job.name}': {error.strerror}") from None
            finally:
                os.sched_setaffinity(0, before)
        self._children[job.name] = child
        self._pidfds[job.name] = os.pidfd_open(child.pid)
        return child.pid

    def adopt(self, name: str) -> int | None:
        """Returns the process that trains in a job's folder, of an earlier scheduler; None if there is none."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                pid = int(path.parent.name)
                pidfd = os.pidfd_open(pid)
                if self._trains(path, name):  # read after it was opened: the pid cannot have passed to another one
                    self._pidfds[name] = pidfd
                    return pid
                os.close(pidfd)
        return None

    def _trains(self, path: Path, name: str) -> bool:
        words = path.read_bytes().split(b"\0")
        place = words.index(b"--run-dir") if b"--run-dir" in words else len(words)
        return b"train" in words and words[place + 1 : place + 2] == [os.fsencode(self.run_folder(name))]

    def has_ended(self, name: str) -> bool:
        """Whether a job's process has ended; it is forgotten by `exit_code`."""
        with selectors.DefaultSelector() as look:
            look.register(self._pidfds[name], selectors.EVENT_READ)
            return bool(look.select(0))

    def exit_code(self, name: str) -> int | None:
        """Returns the exit code of an ended process, negative for a signal; None for one of an earlier scheduler."""
        os.close(self._pidfds.pop(name))
        child = self._children.pop(name, None)
        return child.wait() if child is not None else None

    def send(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to a job's process."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfds[name], number)

    def steps(self, name: str) -> int:
        """Returns the updates that a job has made."""
        folder = RunFolder(self.run_folder(name))
        return max((step_of(row) for row in read_metrics(folder.metrics) if "loss" in row), default=0)

    def last_words(self, name: str) -> str:
        """Returns the last line of a job's log."""
        with suppress(OSError):
            lines = self.log_of(name).read_text("utf-8", "replace").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "").removeprefix("pipedejavu: ")
        return ""

    def wait(self, timeout_s: float | None) -> None:
        """Sleeps until a process ends, a stop signal arrives, or the time is over."""
        with selectors.DefaultSelector() as events:
            for pidfd in self._pidfds.values():
                events.register(pidfd, selectors.EVENT_READ)
            if self._wakes is not None:
                events.register(self._wakes, selectors.EVENT_READ)
            ready = {key.fd for key, _ in events.select(timeout_s)}
        if self._wakes in ready and self._wakes is not None:
            os.read(self._wakes, 4096)

    def now_at(self) -> float:
        """Returns the time of the system's clock."""
        return time.time()

    @contextmanager
    def obeying(self) -> Iterator[None]:
        """Notes SIGTERM, SIGHUP and Ctrl-C in place of ending at once."""
        self._wakes, ends = os.pipe()
        os.set_blocking(ends, False)

        def handle(number: int, _: object) -> None:
            self.stop_number = number

        numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
        handlers = {number: signal.signal(number, handle) for number in numbers}
        woken = signal.set_wakeup_fd(ends)
        try:
            yield
        finally:
            signal.set_wakeup_fd(woken)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.close(self._wakes)
            os.close(ends)
            self._wakes = None
