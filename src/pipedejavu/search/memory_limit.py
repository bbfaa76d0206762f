"""Memory limits of devices, and machines with changed limits."""

from collections.abc import Collection

from pipedejavu.facts import Device, Machine


def memory_limit_of(device: Device) -> int:
    """Returns the usable bytes of a device."""
    return device.memory_bytes - device.reserved_bytes


def with_memory(
    machine: Machine, *, times: float = 1.0, extra_bytes: float = 0.0, types: Collection[str] = ("gpu", "cpu")
) -> Machine:
    """Returns the machine with changed memory limits on all devices of some types."""
    devices = (
        d.replace(memory_bytes=d.reserved_bytes + round(memory_limit_of(d) * times + extra_bytes))
        if d.type in types
        else d
        for d in machine.devices
    )
    return machine.replace(devices=tuple(devices))
