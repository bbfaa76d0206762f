"""Describes this machine: its shape as the operating system states it, or all figures that a survey measures.

Importing this package does not import torch; `survey` does.
"""

from pipedejavu.probe.machine_shape import read_shape

__all__ = ["read_shape"]
