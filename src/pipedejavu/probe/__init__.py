"""What this machine is; so far its shape, as the operating system states it."""

from pipedejavu.probe.shape import read_shape

__all__ = ["read_shape"]
