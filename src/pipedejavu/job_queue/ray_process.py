"""Processes of `train` on the nodes of a Ray cluster, in the place of those on this host.

    scheduler ──start, send──▶ actor in a placement group of one bundle ──▶ `train` process on the bundle's node

Actors and groups are detached: they outlive the scheduler, and the next one finds them by their names. A `train`
process ends with its actor, so that a job never runs on two nodes. All nodes see the folder of the queue.
"""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from pipedejavu.cluster import ClusterJob, Server
from pipedejavu.cluster.cluster_job import MILLI
from pipedejavu.facts import InputError
from pipedejavu.job_queue.job_process import JobProcesses

_NAMESPACE = "pipedejavu"
_SLICE_S, _LOOK_S, _PATIENCE_S = 0.2, 2.0, 10.0
"""How long a wait is at most, how often nodes are looked at, and how long Ray may be silent."""
_MOST_CALLS = 64
"""Calls that an actor serves at once: one runs the process, and each scheduler so far waits for its end."""
_START = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # it ends with the actor
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
cores, wanted = sorted(os.sched_getaffinity(0)), [int(number) for number in sys.argv[2].split(",")]
os.sched_setaffinity(0, {cores[number % len(cores)] for number in wanted})
os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
"""


T = TypeVar("T")


class RayLostError(Exception):
    """Ray does not answer any more."""


class RayNode(NamedTuple):
    """A node that runs jobs: its devices are its GPUs, or without any in the cluster its CPUs."""

    node_id: str
    name: str
    devices: int
    cpus: int
    has_gpus: bool
    memory_bytes: int

    def as_server(self) -> Server:
        """Returns the node as a server whose GPUs are its devices."""
        kind = "gpu" if self.has_gpus else "cpu"
        return Server(f"{self.name}/{self.node_id[:6]}", kind, self.devices, MILLI * self.cpus, self.memory_bytes)

    def bundle(self, count: int) -> dict[str, float]:
        """Returns the resources of some of its devices, each GPU with an even part of the CPUs."""
        if not self.has_gpus:
            return {"CPU": float(count)}
        return {"GPU": float(count), "CPU": float(max(1, self.cpus * count // self.devices))}

    def cores(self, slots: Sequence[int]) -> list[int]:
        """Returns the numbers of the cores that go with some of its devices."""
        if not self.has_gpus:
            return list(slots)
        parts = (range(n * self.cpus // self.devices, (n + 1) * self.cpus // self.devices) for n in slots)
        return [core for part in parts for core in part] or [0]


class JobActor:
    """Runs the `train` process of one job on a node; Ray makes it an actor."""

    def __init__(self, devices: Sequence[tuple[str, int]]):
        self.devices = list(devices)
        self._child: subprocess.Popen[bytes] | None = None
        self._begun, self._ended = threading.Event(), threading.Event()
        self._code, self._fault = 0, ""

    def run(self, words: Sequence[str], cores: Sequence[int], log: str) -> None:
        """Runs Python with some words on some cores until it ends."""
        try:
            with Path(log).open("ab") as file:
                about = [str(os.getpid()), ",".join(map(str, cores))]
                self._child = subprocess.Popen(
                    [sys.executable, "-c", _START, *about, *words], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                    start_new_session=True,
                )  # fmt: skip
            self._begun.set()
            self._code = self._child.wait()
        except OSError as error:
            self._fault = f"cannot start on {socket.gethostname()}: {error.strerror} ({log}); do all nodes see --out?"
        self._begun.set()
        self._ended.set()

    def end(self) -> tuple[int, str]:
        """Returns the exit code once the process has ended, and why it could not start."""
        self._ended.wait()
        return self._code, self._fault

    def send(self, number: int) -> None:
        """Sends a signal to the process."""
        self._begun.wait()
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def about(self) -> tuple[int, list[tuple[str, int]]]:
        """Returns the process, and its devices as nodes and numbers there."""
        self._begun.wait()
        return self._child.pid if self._child is not None else 0, self.devices


class _Handle(NamedTuple):
    actor: Any
    end: Any


def connect(address: str) -> list[RayNode]:
    """Connects to a Ray cluster; returns its nodes. Raises InputError if there is no Ray, or no node with devices."""
    try:
        ray = import_module("ray")
    except ImportError:
        raise InputError("--ray needs ray, which is not installed: pip install 'pipedejavu[ray]'") from None
    host, _, port = address.rpartition(":")
    if address != "auto" and not (host and port.isascii() and port.isdigit() and "/" not in host):
        raise InputError(f"--ray is the HOST:PORT of a Ray cluster, or auto, not '{address}'")
    try:
        if host:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=_PATIENCE_S).close()
        ray.init(address=address, namespace=_NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        reason = next(iter(str(error).strip().splitlines()), "")
        raise InputError(f"no Ray answers at '{address}' ({reason}); start one with 'ray start --head'") from None
    alive = [node for node in ray.nodes() if node["Alive"]]
    has_gpus = any(node["Resources"].get("GPU", 0) >= 1 for node in alive)
    nodes = [
        RayNode(
            node["NodeID"], node["NodeManagerHostname"], int(node["Resources"].get("GPU" if has_gpus else "CPU", 0)),
            int(node["Resources"].get("CPU", 0)), has_gpus, int(node["Resources"].get("memory", 0)),
        )
        for node in sorted(alive, key=lambda node: str(node["NodeID"]))
    ]  # fmt: skip
    if not any(node.devices for node in nodes):
        raise InputError(f"Ray at '{address}' has {len(nodes)} nodes without CPUs or GPUs; start them with some")
    return [node for node in nodes if node.devices]


class RayProcesses(JobProcesses):
    """The processes of the jobs of a queue, on the nodes of a Ray cluster."""

    def __init__(self, folder: Path, nodes: Sequence[RayNode], tell: Callable[[str], None]):
        super().__init__(folder, ())
        self.nodes, self.tell = list(nodes), tell
        self._ray, self._prefix = import_module("ray"), hashlib.sha256(os.fsencode(self.folder)).hexdigest()[:12]
        self._slots = [(node.node_id, slot) for node in self.nodes for slot in range(node.devices)]
        self._handles: dict[str, _Handle] = {}
        self._ended: dict[str, tuple[int | None, str]] = {}
        self._on: dict[str, str] = {}
        """The node of each job that runs."""
        self._placed: dict[str, tuple[int, ...]] = {}
        self._lost: set[str] = set()
        host, _, port = self._ray.get_runtime_context().gcs_address.rpartition(":")
        self._gcs = host, int(port)
        self._looked_s = time.monotonic()

    def lost(self) -> frozenset[int]:
        """Returns the numbers of the nodes that are gone."""
        return frozenset(number for number, node in enumerate(self.nodes) if node.node_id in self._lost)

    def start(self, job: ClusterJob, devices: Sequence[int]) -> int | None:
        """Starts or continues a job on devices of one node; Ray says later which process it is."""
        self._free(job.name)
        self._call(lambda: self._start(job, devices))
        return None

    def _start(self, job: ClusterJob, devices: Sequence[int]) -> None:
        placed = [self._slots[number] for number in devices]
        node = next(node for node in self.nodes if node.node_id == placed[0][0])
        bundle = node.bundle(len(placed))
        groups = import_module("ray.util.placement_group")
        strategies = import_module("ray.util.scheduling_strategies")
        group = groups.placement_group(
            [bundle], strategy="STRICT_PACK", lifetime="detached", name=self._name(job.name),
            bundle_label_selector=[{"ray.io/node-id": node.node_id}],
        )  # fmt: skip
        place = strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        make = self._ray.remote(JobActor).options(
            name=self._name(job.name), lifetime="detached", max_concurrency=_MOST_CALLS, scheduling_strategy=place,
            num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0),
        )  # fmt: skip
        actor = make.remote(placed)
        cores = node.cores([slot for _, slot in placed])
        actor.run.remote(self.command(job, len(placed)), cores, str(self.log_of(job.name)))
        self._handles[job.name] = _Handle(actor, actor.end.remote())
        self._on[job.name] = node.node_id

    def adopt(self, name: str) -> int | None:
        """Returns the process of a job that an earlier scheduler has started; None if there is none."""
        try:
            actor, (pid, placed) = self._call(lambda: self._find(name))
        except (ValueError, self._ray.exceptions.RayError):
            self._free(name)
            return None
        if tuple(placed[0]) not in self._slots:  # Ray does not list its node any more
            self._free(name)
            return None
        self._handles[name], self._on[name] = _Handle(actor, actor.end.remote()), placed[0][0]
        self._placed[name] = tuple(self._slots.index(tuple(slot)) for slot in placed)
        return int(pid)

    def _find(self, name: str) -> tuple[Any, Any]:
        """Returns the actor of a job, and what it says about itself."""
        actor = self._ray.get_actor(self._name(name))
        return actor, self._ray.get(actor.about.remote(), timeout=_PATIENCE_S)

    def devices_of(self, name: str) -> tuple[int, ...]:
        """Returns the devices of a process that was adopted: nodes may have other numbers than before."""
        return self._placed[name]

    def has_ended(self, name: str) -> bool:
        """Whether a job's process has ended, or its node is gone."""
        if name in self._ended:
            return True
        handle, errors = self._handles[name], self._ray.exceptions
        if self._on[name] in self._lost:
            self._ended[name] = None, ""
        elif self._ray.wait([handle.end], timeout=0)[0]:
            try:
                self._ended[name] = self._ray.get(handle.end)
            except errors.ActorUnavailableError:  # it may answer again
                self._handles[name] = handle._replace(end=handle.actor.end.remote())
            except errors.RayError:
                self._ended[name] = None, ""
        if name in self._ended and self._ended[name][0] is None:
            self._check()
            node = next(node for node in self.nodes if node.node_id == self._on[name])
            self.tell(f"Ray has lost job '{name}' on node {node.name}; it goes on from its last checkpoint")
        return name in self._ended

    def exit_code(self, name: str) -> int | None:
        """Returns the exit code of an ended process; None if Ray has lost it."""
        code, fault = self._ended.pop(name)
        self._handles.pop(name)
        self._on.pop(name)
        self._free(name)
        if fault:
            with suppress(OSError), self.log_of(name).open("a") as log:
                log.write(f"{fault}\n")
            return 1
        return code

    def send(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to a job's process."""
        self._handles[name].actor.send.remote(int(number))

    def wait(self, timeout_s: float | None) -> None:
        """Sleeps until a process ends, a stop signal arrives, a node is lost, or the time is over."""
        until_s = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        before = frozenset(self._lost)
        while not self.stop_number and time.monotonic() < until_s and self._lost == before:
            slice_s = max(0.0, min(_SLICE_S, until_s - time.monotonic()))
            ends = [handle.end for handle in self._handles.values()]
            if ends and self._ray.wait(ends, timeout=slice_s)[0]:
                return
            if not ends:
                time.sleep(slice_s)
            self._look()

    @contextmanager
    def obeying(self) -> Iterator[None]:
        """Notes signals in place of ending at once; what Ray prints of its nodes goes to stderr meanwhile."""
        with super().obeying(), redirect_stdout(sys.stderr):
            yield

    def _look(self) -> None:
        """Looks at the nodes now and then."""
        if time.monotonic() - self._looked_s < _LOOK_S:
            return
        self._check()
        self._looked_s = time.monotonic()
        alive = {node["NodeID"] for node in self._call(self._ray.nodes) if node["Alive"]}
        for node in self.nodes:
            if node.node_id not in alive | self._lost:
                self.tell(f"node {node.name} ({node.node_id[:6]}) is lost, with {node.devices} devices")
        self._lost = {node.node_id for node in self.nodes} - alive

    def _call(self, call: Callable[[], T]) -> T:
        """Makes a call of Ray, and raises RayLostError if Ray ends meanwhile: the call would end this process."""
        results: SimpleQueue[Future[T]] = SimpleQueue()

        def make() -> None:
            result: Future[T] = Future()
            try:
                result.set_result(call())
            except BaseException as error:
                result.set_exception(error)
            results.put(result)

        threading.Thread(target=make, daemon=True).start()
        while True:
            try:
                return results.get(timeout=_LOOK_S).result()
            except Empty:
                self._check()

    def _check(self) -> None:
        """Raises RayLostError if Ray does not answer any more."""
        until_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                socket.create_connection(self._gcs, timeout=_LOOK_S).close()
                return
            except OSError:
                if time.monotonic() > until_s:
                    address = ":".join(map(str, self._gcs))
                    raise RayLostError(f"Ray at {address} does not answer any more") from None
                time.sleep(_SLICE_S)

    def _name(self, job: str) -> str:
        return f"{self._prefix}/{job}"

    def _free(self, name: str) -> None:
        """Removes the actor and the placement groups of a job."""
        self._call(lambda: self._remove(name))

    def _remove(self, name: str) -> None:
        with suppress(ValueError):
            self._ray.kill(self._ray.get_actor(self._name(name)))
        groups = import_module("ray.util.placement_group")
        for number, about in self._ray.util.placement_group_table().items():
            if about["name"] == self._name(name) and about["state"] != "REMOVED":
                found = groups.PlacementGroup(self._ray.PlacementGroupID.from_hex(number))
                self._ray.util.remove_placement_group(found)
