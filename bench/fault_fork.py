"""Processes that begin with torch imported: a server that has it forks each run, and a run its workers.

An injected fault takes six processes, and importing torch is nearly all of their time. What is forked is a process like
any other, with its own session, signals and parent. The server has one thread, so that a fork is safe.
"""

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NUM_WORKERS = 2
LOOK_S = 0.01


class ForkServer:
    """Starts runs; one server for all threads of the bench."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def ask(self, **request: Any) -> Any:
        """Sends a request and returns its answer."""
        assert self.process.stdin
        assert self.process.stdout
        with self.lock:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())


class ForkedProcess:
    """A run that the server has forked, with the methods of `subprocess.Popen` that the bench calls."""

    def __init__(self, server: ForkServer, code: str, arguments: list[str], cwd: Path, env: dict[str, str]):
        self.server, self.returncode = server, None
        source, sink = os.pipe()
        self.pid: int = server.ask(
            code=code, arguments=arguments, cwd=str(cwd), env=env, stderr=f"/proc/{os.getpid()}/fd/{sink}"
        )
        os.close(sink)
        self._said = ""
        self._reader = threading.Thread(target=self._read, args=(source,), daemon=True)
        self._reader.start()

    def _read(self, source: int) -> None:
        with open(source, errors="replace") as file:
            self._said = file.read()

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.server.ask(wait=self.pid)
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(LOOK_S)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Waits until no process holds its pipe any more; returns what was said there."""
        self._reader.join(timeout)
        if self._reader.is_alive():
            raise subprocess.TimeoutExpired("a forked run", timeout)
        self.wait()
        return "", self._said

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _serve() -> None:
    """Answers requests: forks a run, or says how one has ended."""
    for name in ("fault_worker", "pipedejavu.launch", "pipedejavu.cli.train_command"):
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            stderr = os.open(request["stderr"], os.O_WRONLY)
            answer = os.fork()
            if not answer:
                _become(request, stderr)
            os.close(stderr)
        print(json.dumps(answer), flush=True)


def _become(request: dict[str, Any], stderr: int) -> None:
    """Turns a fork of the server into a run; does not return."""
    os.setsid()
    os.chdir(request["cwd"])
    nothing = os.open(os.devnull, os.O_RDWR)
    for source, target in ((nothing, 0), (nothing, 1), (stderr, 2)):
        os.dup2(source, target)
    os.closerange(3, 256)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["-c", *request["arguments"]]
    _fork_workers()
    code = 1
    try:
        exec(request["code"], {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stderr.flush()
        os._exit(code)


def _fork_workers() -> None:
    """Forks the first workers that the run will start, before it has any thread; later ones are started as usual."""
    from pipedejavu.launch import launch

    context, start, workers = multiprocessing.get_context("fork"), launch.start_processes, []
    for _ in range(NUM_WORKERS):
        mine, its = context.Pipe()
        process = context.Process(target=_work_when_told, args=(its, [*(end for _, end in workers), mine]))
        process.start()
        its.close()
        workers.append((process, mine))

    def start_forked(work: Any, args: tuple[Any, ...], nprocs: int, **options: Any) -> Any:
        if len(workers) != nprocs:
            return start(work, args, nprocs, **options)
        for rank, (_, end) in enumerate(workers):
            end.send((work, rank, args))
        processes = [process for process, _ in workers]
        workers.clear()
        return SimpleNamespace(processes=processes)

    launch.start_processes = start_forked


def _work_when_told(told: Connection, others: list[Connection]) -> None:
    for end in others:  # so that the pipe of a worker closes with the run alone
        end.close()
    try:
        work, rank, args = told.recv()
    except EOFError:
        os._exit(0)
    work(rank, *args)


if __name__ == "__main__":
    _serve()
