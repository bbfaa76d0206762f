"""What this machine is: its shape as the operating system states it, or all that a survey measures.

Without torch there is the shape alone: `survey` imports it.
"""

from pipedejavu.probe.machine_shape import read_shape

__all__ = ["read_shape"]
