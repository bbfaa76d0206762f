"""What a grid of workers stands on: the device of each, and the links that its tensor, data and pipeline groups use.

Workers are numbered with the tensor group fastest, then data, then pipeline, and take a machine's GPUs in order: tensor
groups stay within a host as long as they fit. Groups of one kind move bytes at the same time, and share wires.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from pipedejavu.facts import Device, InputError, Machine


class Grid(NamedTuple):
    """How many workers divide the operators, the batch and the layers."""

    tensor: int
    data: int
    pipeline: int

    @property
    def size(self) -> int:
        """All workers."""
        return self.tensor * self.data * self.pipeline

    def worker(self, tensor: int, data: int, pipeline: int) -> int:
        """Returns a worker's number."""
        return tensor + self.tensor * (data + self.data * pipeline)


class WiredLine(NamedTuple):
    """The slowest link of a group while all groups of its kind are busy."""

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")

    def send_s(self, size_bytes: float) -> float:
        """Returns what a message takes."""
        return self.latency_s + size_bytes / self.bytes_per_s

    def reduce_s(self, size_bytes: float, members: int) -> float:
        """Returns what an all-reduce around a ring takes."""
        rounds = 2 * (members - 1)
        return rounds * (self.latency_s + size_bytes / members / self.bytes_per_s)


class Wiring(NamedTuple):
    """The device of every worker, and the lines of the groups."""

    device: Device
    tensor: WiredLine
    data: WiredLine
    pipeline: WiredLine
    ends: WiredLine
    """Between the first and the last stage, which share their embedding."""


def wire(grid: Grid, machine: Machine) -> Wiring:
    """Returns the wiring of a grid on a machine's GPUs; raises InputError where there are too few of one kind."""
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
    """Returns the slowest of transfers that all run at once; those within a device take no time."""
    routes = [machine.route(source, target) for source, target in pairs if source != target]
    users = Counter(name for route in routes for name in route.wires)
    rates = [r.bytes_per_s / max((users[name] for name in r.wires), default=1) for r in routes]
    return WiredLine(max(r.latency_s for r in routes), min(rates)) if routes else WiredLine()
