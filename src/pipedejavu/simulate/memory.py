"""Memory over time: the bytes that each worker holds on its device and its host, by class."""

from collections.abc import Sequence
from math import inf

from pipedejavu.analysis.liveness import CLASSES, Liveness, Stay
from pipedejavu.facts import MEMORY_CLASSES, InputError, MemoryCurve
from pipedejavu.program import Value, ValueKind
from pipedejavu.simulate.allocator import Footprint, replay

MAX_POINTS = 400
"""Points per curve; of a longer one each point is the highest of several."""
MAX_TENSORS = 16
"""Temporary tensors per action at most."""


def trace_memory(liveness: Liveness, worker: int, stays: list[Stay], makespan_s: float) -> tuple[MemoryCurve, ...]:
    """Returns the curve of a worker's device memory and, if it keeps anything there, of its host memory."""
    program, machine = liveness.program, liveness.program.machine
    device = machine.device(program.devices[worker])
    fixed = liveness.fixed(worker)
    curves = []
    for memory in ("device", "host"):
        here = [s for s in stays if (s.value[4] == "host") == (memory == "host")]
        base = {c: size for (where, c), size in fixed.items() if where == memory and size}
        if memory == "host" and not here and not base:
            continue
        owner = device if memory == "device" else machine.cpu_of(device)
        curves.append(_curve(memory, owner.memory_bytes - owner.reserved_bytes, here, base, makespan_s))
    return tuple(curves)


def trace_footprint(liveness: Liveness, worker: int, stays: list[Stay]) -> Footprint | None:
    """Returns the footprint of a worker's values in its GPU's allocator; None on a CPU or without sizes of tensors.

    If the device's memory is not enough, the footprint is that of an unlimited device. A tensor-parallel group divides
    every tensor evenly, and the footprint is the sum over its devices.
    """
    program, sizes = liveness.program, liveness.sizes
    device, tp_group = program.machine.device(program.devices[worker]), program.plan.degrees[worker]
    if not sizes.is_detailed or device.type != "gpu":
        return None
    rows, known = [], dict[tuple[str, int, float], list[float]]()
    for s in stays:
        what, piece, _, _, place = s.value
        key = (what, piece, s.size_bytes)
        if place != "host":
            if key not in known:
                like = (
                    _cut(s.size_bytes, sizes.largest_output(piece))
                    if what == ValueKind.WORKSPACE
                    else sizes.parts(s.value)
                )
                known[key] = _divided(s.size_bytes / tp_group, like)
            rows.append((s.birth, s.death, known[key]))
    for (memory, kind), size in liveness.fixed(worker).items():
        tensors = [n for piece, replica in program.held(worker) for n in sizes.parts(Value.weights(piece, replica, 0))]
        moments = 2 if kind == "optimizer" else 1
        if memory == "device" and size:
            rows.append((0.0, inf, _divided(size / tp_group, tensors * moments)))
    try:
        footprint = replay(rows, (device.memory_bytes - device.reserved_bytes) / tp_group)
    except InputError:
        footprint = replay(rows)
    return Footprint(tp_group * footprint.allocated_bytes, tp_group * footprint.reserved_bytes)


def _cut(size_bytes: float, most_bytes: float) -> list[float]:
    """Returns the sizes of an action's temporary tensors: each as large as its largest output, the rest in the last.

    There are at most about `MAX_TENSORS`, also if the output is very small, as that of a loss is.
    """
    most_bytes = max(most_bytes, size_bytes / MAX_TENSORS) if most_bytes else 0.0
    count = int(size_bytes // most_bytes) if most_bytes else 0
    return [most_bytes] * count + [size_bytes - count * most_bytes]


def _divided(size_bytes: float, like: list[float]) -> list[float]:
    """Returns sizes that add up to `size_bytes`, in the proportions of `like`."""
    total = sum(like)
    return [size_bytes * part / total for part in like] if total else [size_bytes]


def _curve(
    memory: str, capacity_bytes: int, stays: list[Stay], base: dict[str, float], makespan_s: float
) -> MemoryCurve:
    """Returns the curve of one memory, by class."""
    changes = [(s.birth, 1, s.value, s.size_bytes) for s in stays]
    changes += [(s.death, 0, s.value, s.size_bytes) for s in stays]
    changes.sort(key=lambda c: c[:2])  # at equal times, values are freed before others are allocated
    level = dict.fromkeys(MEMORY_CLASSES, 0.0) | base
    total = sum(level.values())
    peak, peak_level = total, dict(level)
    versions: dict[tuple[int, int], int] = {}
    rows = [(0.0, *level.values())]
    for time, comes, value, size in changes:
        name = CLASSES[value[0]]
        if name == "weights":
            # The first version of a piece is its weights, any further one an extra version.
            key = (value[1], value[2])
            versions[key] = versions.get(key, 0) + (1 if comes else -1)
            if versions[key] - comes > 0:
                name = "versions"
        level[name] += size if comes else -size
        total += size if comes else -size
        if total > peak:
            peak, peak_level = total, dict(level)
        if time == rows[-1][0]:
            rows[-1] = (time, *level.values())
        else:
            rows.append((time, *level.values()))
    rows = _thinned([r for r in rows if r[0] <= makespan_s])
    columns = list(zip(*rows, strict=True))
    return MemoryCurve.model_validate(
        {
            "memory": memory,
            "capacity_bytes": capacity_bytes,
            "times_s": columns[0],
            "classes": {name: columns[i + 1] for i, name in enumerate(MEMORY_CLASSES)},
            "peak_bytes": peak,
            "peak_classes": peak_level,
        }
    )


def _thinned(rows: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Returns at most `MAX_POINTS` rows: the highest of each interval, so that peaks survive."""
    if len(rows) <= MAX_POINTS:
        return rows
    step = -(-len(rows) // MAX_POINTS)
    stretches: Sequence[list[tuple[float, ...]]] = [rows[i : i + step] for i in range(0, len(rows), step)]
    return [max(s, key=lambda row: sum(row[1:])) for s in stretches]
