"""The wiring of a grid of workers: their device, and the links of its tensor, data and pipeline groups.

Worker numbers run over the tensor group first, then data, then pipeline, and workers take a machine's GPUs in order, so
tensor groups stay within a host as long as they fit. Groups of one kind communicate at the same time and share wires.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from pipedejavu.facts import Device, InputError, Machine


class Grid(NamedTuple):
    """Degrees of tensor, data and pipeline parallelism."""

    tensor: int
    data: int
    pipeline: int

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.tensor * self.data * self.pipeline

    def worker(self, tensor: int, data: int, pipeline: int) -> int:
        """Returns a worker's number."""
        return tensor + self.tensor * (data + self.data * pipeline)


class WiredLine(NamedTuple):
    """The slowest link of a group while all groups of its kind communicate."""

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")

    def send_s(self, size_bytes: float) -> float:
        """Returns the time of a message."""
        return self.latency_s + size_bytes / self.bytes_per_s

    def reduce_s(self, size_bytes: float, workers: int) -> float:
        """Returns the time of a ring all-reduce."""
        rounds = 2 * (workers - 1)
        return rounds * (self.latency_s + size_bytes / workers / self.bytes_per_s)


class Wiring(NamedTuple):
    """The device that all workers have, and the links of their groups."""

    device: Device
    tensor: WiredLine
    data: WiredLine
    pipeline: WiredLine
    ends: WiredLine
    """Link between the first and the last stage, which share their embedding."""


def wire(grid: Grid, machine: Machine) -> Wiring:
    """Returns the wiring of a grid on a machine's GPUs; raises InputError if there are too few of one kind."""
    gpus = [device for device in machine.devices if device.type == "gpu"]
    if grid.size > len(gpus):
        raise InputError(
            f"{grid.tensor} × {grid.data} × {grid.pipeline} workers need {grid.size} GPUs, but machine"
            f" '{machine.name}' has {len(gpus)}; give it more hosts, such as '2x(8xa100-80gb), 800Gb/s'"
        )
    used = gpus[: grid.size]
    kinds = {device.kind for device in used}
    if len(kinds) > 1:
        raise InputError(f"a grid needs GPUs of one kind, not {', '.join(sorted(kinds))}; name one in the machine")
    if not used[0].flop_per_s or not used[0].memory_bytes_per_s:
        raise InputError(f"device '{used[0].name}' states no flop_per_s or no memory_bytes_per_s; add them")
    names = [device.name for device in used]
    cells = [(t, d, p) for p in range(grid.pipeline) for d in range(grid.data) for t in range(grid.tensor)]
    tensor = ((names[grid.worker(t, d, p)], names[grid.worker((t + 1) % grid.tensor, d, p)]) for t, d, p in cells)
    data = ((names[grid.worker(t, d, p)], names[grid.worker(t, (d + 1) % grid.data, p)]) for t, d, p in cells)
    after = [(t, d, p) for t, d, p in cells if p + 1 < grid.pipeline]
    pipeline = ((names[grid.worker(t, d, p)], names[grid.worker(t, d, p + 1)]) for t, d, p in after)
    ends = ((names[grid.worker(t, d, 0)], names[grid.worker(t, d, grid.pipeline - 1)]) for t, d, p in cells if not p)
    return Wiring(used[0], *(_line(machine, pairs) for pairs in (tensor, data, pipeline, ends)))


def _line(machine: Machine, pairs: Iterable[tuple[str, str]]) -> WiredLine:
    """Returns the slowest link if all transfers run at once; transfers within a device take no time."""
    routes = [machine.route(source, target) for source, target in pairs if source != target]
    users = Counter(name for route in routes for name in route.wires)
    rates = [r.bytes_per_s / max((users[name] for name in r.wires), default=1) for r in routes]
    return WiredLine(max(r.latency_s for r in routes), min(rates)) if routes else WiredLine()
