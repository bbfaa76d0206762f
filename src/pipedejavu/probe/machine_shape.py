"""This machine's shape: cores and memory as the operating system states them, with assumed rates.

Nothing is measured. The cores are divided evenly into one CPU device per worker.
"""

import os
import platform

from pipedejavu.facts import Device, Host, Link, Machine, part_kind

ASSUMED_FLOP_PER_S_PER_CORE = 50e9
"""float32 matrix products on one modern core."""
ASSUMED_MEMORY_BYTES_PER_S = 20e9
ASSUMED_LINK_BYTES_PER_S = 5e9
"""Between processes of one host, through shared memory."""
ASSUMED_LINK_LATENCY_S = 20e-6


def read_shape(num_devices: int, *, by_kind: bool = False) -> Machine:
    """Returns this machine as `num_devices` equal CPU devices; with `by_kind` they have the kind of such parts."""
    cores, memory_bytes = num_cores(), total_memory_bytes()
    name = platform.node() or "here"
    devices = tuple(
        Device(
            name=f"cpu{n}",
            kind=part_kind("cpu", num_devices) if by_kind else "cpu",
            type="cpu",
            host=name,
            memory_bytes=memory_bytes // num_devices,
            flop_per_s=ASSUMED_FLOP_PER_S_PER_CORE * cores / num_devices,
            memory_bytes_per_s=ASSUMED_MEMORY_BYTES_PER_S / num_devices,
        )
        for n in range(num_devices)
    )
    link = Link(latency_s=ASSUMED_LINK_LATENCY_S, bytes_per_s=ASSUMED_LINK_BYTES_PER_S)
    return Machine(name=name, hosts=(Host(name=name, cores=cores),), devices=devices, links=(link,))


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def total_memory_bytes() -> int:
    """Returns the size of this host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
