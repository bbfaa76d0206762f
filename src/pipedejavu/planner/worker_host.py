"""The hosts of workers: their cores, memory and GPUs, and the machine and thread counts that follow from them.

Sizes come from the operating system and the driver; rates are assumed, as in `probe`.
"""

import math
import platform
import re
from collections.abc import Sequence
from typing import Literal

import torch

from pipedejavu.engine.tensor_parallel import check_divisible
from pipedejavu.facts import MANY_CORES, Device, Host, InputError, Link, Machine, Record
from pipedejavu.plan import Plan
from pipedejavu.probe.machine_shape import (
    ASSUMED_LINK_BYTES_PER_S,
    ASSUMED_LINK_LATENCY_S,
    ASSUMED_MEMORY_BYTES_PER_S,
    num_cores,
    total_memory_bytes,
)

DeviceChoice = Literal["auto", "cpu", "gpu", "shared-gpu"]
"""With shared-gpu, the workers of a host take its GPUs in turn, so that several may share one."""

ASSUMED_NETWORK_BYTES_PER_S = 1.25e9
"""Ten gigabits per second between hosts."""
ASSUMED_NETWORK_LATENCY_S = 100e-6


class Gpu(Record):
    """One GPU, as its driver describes it."""

    kind: str
    memory_bytes: int


class WorkerHost(Record):
    """The host of one worker: its cores, memory and GPUs."""

    host: str
    local_rank: int
    """The worker's number among the workers of its host."""
    cores: int
    memory_bytes: int
    gpus: tuple[Gpu, ...]


def read_worker_host(host: str, local_rank: int) -> WorkerHost:
    """Reads the cores, memory and GPUs of this host, for one worker."""
    gpus = []
    for n in range(num_gpus()):
        properties = torch.cuda.get_device_properties(n)
        kind = re.sub("[^a-z0-9]+", "-", properties.name.lower()).strip("-")
        gpus.append(Gpu(kind=kind, memory_bytes=properties.total_memory))
    return WorkerHost(
        host=host, local_rank=local_rank, cores=num_cores(), memory_bytes=total_memory_bytes(), gpus=tuple(gpus)
    )


def read_worker_hosts(count: int) -> tuple[WorkerHost, ...]:
    """Returns the host of each of `count` workers that all run on this host."""
    here = read_worker_host(platform.node() or "here", 0)
    return tuple(here.replace(local_rank=n) for n in range(count))


def make_machine(plan: Plan, worker_hosts: Sequence[WorkerHost], choice: DeviceChoice) -> tuple[Plan, Machine]:
    """Returns the plan with its workers placed, and a machine with a device for each worker.

    The n-th worker of a host gets its n-th GPU, if the host has that many; CPU replicas, servers and the remaining
    workers share the host's cores. With `shared-gpu` the workers take the GPUs in turn, each with its share of the
    memory.
    """
    check_divisible(plan)
    on_gpu = _choose_gpus(plan, worker_hosts, choice)
    hosts = {worker_host.host: worker_host for worker_host in worker_hosts}
    sharing = {name: sum(s.host == name and not g for s, g in zip(worker_hosts, on_gpu, strict=True)) for name in hosts}
    devices = [
        _gpu(rank, worker_host, on_gpu, worker_hosts)
        if is_gpu
        else _cpu(f"cpu{rank}", worker_host, sharing[worker_host.host])
        for rank, (worker_host, is_gpu) in enumerate(zip(worker_hosts, on_gpu, strict=True))
    ]
    named = plan.place.devices or ()
    if len({*named}) == len(devices) and not {*named} <= {device.name for device in devices}:
        # The plan names fractions of this machine's CPU: each worker gets one under that name.
        devices = [device.replace(name=name) for device, name in zip(devices, named, strict=True)]
    names = tuple(device.name for device in devices)
    # State that is kept in host memory needs a CPU on every host, even if no worker runs on it.
    devices += [_cpu(f"cpu@{name}", worker_host, 1) for name, worker_host in hosts.items() if not sharing[name]]
    machine = Machine(
        name=", ".join(hosts),
        hosts=tuple(Host(name=name, cores=worker_host.cores) for name, worker_host in hosts.items()),
        devices=tuple(devices),
        links=(
            Link(scope="same-host", latency_s=ASSUMED_LINK_LATENCY_S, bytes_per_s=ASSUMED_LINK_BYTES_PER_S),
            Link(latency_s=ASSUMED_NETWORK_LATENCY_S, bytes_per_s=ASSUMED_NETWORK_BYTES_PER_S),
        ),
    )
    return plan.replace(place=plan.place.replace(devices=plan.place.devices or names)), machine


def _choose_gpus(plan: Plan, worker_hosts: Sequence[WorkerHost], choice: DeviceChoice) -> list[bool]:
    """Returns for each worker whether it runs on a GPU; raises InputError if all must and a host has too few."""
    trainers = plan.num_workers - plan.place.cpu_replicas - plan.place.servers
    on_gpu = [
        choice != "cpu"
        and rank < trainers
        and worker_host.local_rank
        < (math.inf if choice == "shared-gpu" and worker_host.gpus else len(worker_host.gpus))
        for rank, worker_host in enumerate(worker_hosts)
    ]
    for rank, worker_host in enumerate(worker_hosts[:trainers]):
        if choice == "shared-gpu" and not on_gpu[rank]:
            raise InputError(
                f"worker {rank} is on host '{worker_host.host}', which has no GPU to share; use --devices auto"
            )
        if choice == "gpu" and not on_gpu[rank]:
            raise InputError(
                f"worker {rank} is number {worker_host.local_rank + 1} on host '{worker_host.host}', which has"
                f" {len(worker_host.gpus)} GPUs; use as many workers as there are GPUs, or --devices auto, which puts"
                " the rest on the CPU, or --devices shared-gpu, by which workers share GPUs"
            )
    return on_gpu


def _gpu(rank: int, worker_host: WorkerHost, on_gpu: Sequence[bool], worker_hosts: Sequence[WorkerHost]) -> Device:
    """Returns the GPU of a worker, with its share of the memory if several workers have it."""
    count = len(worker_host.gpus)
    number = worker_host.local_rank % count
    sharing = sum(
        is_gpu and other.host == worker_host.host and other.local_rank % count == number
        for other, is_gpu in zip(worker_hosts, on_gpu, strict=True)
    )
    gpu = worker_host.gpus[number]
    size_bytes = gpu.memory_bytes // sharing
    return Device(name=f"gpu{rank}", kind=gpu.kind, type="gpu", host=worker_host.host, memory_bytes=size_bytes)


def _cpu(name: str, worker_host: WorkerHost, sharing: int) -> Device:
    return Device(
        name=name,
        kind="cpu",
        type="cpu",
        host=worker_host.host,
        memory_bytes=worker_host.memory_bytes // sharing,
        memory_bytes_per_s=ASSUMED_MEMORY_BYTES_PER_S / sharing,
    )


def num_threads(machine: Machine, devices: Sequence[str], worker: int) -> int:
    """Returns the number of threads that a worker computes with on the CPU: its share of its host's cores.

    Beside CPU workers a GPU worker gets one thread, since it mostly waits for its GPU. A worker with many cores leaves
    one free: if a message thread displaced a computing thread, all other computing threads would wait for it.
    """
    device = machine.device(devices[worker])
    beside = [other for name in devices if (other := machine.device(name)).host == device.host]
    cores = min(next(host.cores for host in machine.hosts if host.name == device.host), num_cores())
    gpus = sum(other.type == "gpu" for other in beside)
    if len(beside) == 1:
        return cores
    part = cores // len(beside)
    if 0 < gpus < len(beside):
        part = 1 if device.type == "gpu" else (cores - gpus) // (len(beside) - gpus)
    return max(1, part - (part >= MANY_CORES))


def num_threads_beside(machine: Machine, devices: Sequence[str], worker: int) -> int:
    """Returns how many threads other workers compute with on the host of a CPU worker; 0 for a GPU worker."""
    device = machine.device(devices[worker])
    if device.type == "gpu" and torch.cuda.is_available():
        return 0
    beside = [n for n, name in enumerate(devices) if n != worker and machine.device(name).host == device.host]
    return sum(num_threads(machine, devices, n) for n in beside)


def describe_stand_ins(machine: Machine, devices: Sequence[str], worker_hosts: Sequence[WorkerHost]) -> str:
    """Returns a sentence if a plan uses GPUs that its hosts do not have; empty otherwise."""
    used, absent = {d.host: 0 for d in machine.devices}, []
    for name in dict.fromkeys(devices):
        device = machine.device(name)
        used[device.host] += device.type == "gpu"
        if device.type == "cpu" and not name.rpartition("/")[2].startswith("cpu"):
            absent.append(name)
    present = min(len(worker_host.gpus) for worker_host in worker_hosts)
    most = max(used.values())
    if most > present:
        stand_in = "workers share them" if present else "CPU workers stand in for them, and times are those of the CPU"
        return f"the plan has workers on {most} GPUs of one host, and {present} are there: {stand_in}"
    if absent:
        names = f"{absent[0]} and {len(absent) - 1} more" if len(absent) > 1 else absent[0]
        return (
            f"the plan names {names}, and the hosts of this run do not have such devices: CPU workers stand in for"
            " them, and times are those of the CPU"
        )
    return ""


def devices_to_measure(plan: Plan, machine: Machine, devices: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Returns, for each kind of device that a plan computes or updates on, its first worker and that device's name."""
    firsts: dict[str, tuple[int, str]] = {}
    for worker, name in enumerate(devices):
        device = machine.device(name)
        firsts.setdefault(device.kind, (worker, name))
        if plan.keep.kind in ("host", "split"):  # some updates run on the host of the device
            cpu = machine.cpu_of(device)
            firsts.setdefault(cpu.kind, (worker, cpu.name))
    return firsts


def torch_device(machine: Machine, name: str) -> torch.device:
    """Returns the torch device that runs a device's work on this host: its GPU, or the CPU if there is no GPU."""
    device = machine.device(name)
    if device.type != "gpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    gpus = [d.name for d in machine.devices if d.type == "gpu" and d.host == device.host]
    return torch.device("cuda", gpus.index(device.name) % torch.cuda.device_count())


def num_gpus() -> int:
    """Returns the number of GPUs of this host."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
