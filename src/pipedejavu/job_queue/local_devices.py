"""The devices of this host that jobs hold: its GPUs, each with a part of the cores; without GPUs, its cores."""

import os
import platform
from collections.abc import Sequence
from typing import NamedTuple

import torch

from pipedejavu.cluster import Server
from pipedejavu.facts import InputError
from pipedejavu.probe.machine_shape import total_memory_bytes


class LocalDevice(NamedTuple):
    """A GPU and its cores, or one core."""

    cores: tuple[int, ...]
    gpu: str | None = None
    """What CUDA_VISIBLE_DEVICES calls it."""


def local_devices() -> list[LocalDevice]:
    """Returns the devices that this process may use; raises InputError on systems other than Linux."""
    if not hasattr(os, "pidfd_open") or not hasattr(os, "sched_getaffinity"):
        raise InputError("schedule --run needs Linux, which tells when a process ends; use --machine to simulate")
    cores, gpus = sorted(os.sched_getaffinity(0)), _gpus()
    if not gpus:
        return [LocalDevice((core,)) for core in cores]
    count = len(gpus)
    parts = [cores[n * len(cores) // count : (n + 1) * len(cores) // count] for n in range(count)]
    return [LocalDevice(tuple(part) or tuple(cores), gpu) for part, gpu in zip(parts, gpus, strict=True)]


def _gpus() -> list[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",") if name.strip()] or [str(n) for n in range(count)]
    return names[:count]


def as_server(devices: Sequence[LocalDevice]) -> Server:
    """Returns this host as a server whose GPUs are its devices."""
    kind = "cpu" if devices[0].gpu is None else "gpu"
    cores = {core for device in devices for core in device.cores}
    return Server(platform.node() or "here", kind, len(devices), 1000 * len(cores), total_memory_bytes())
