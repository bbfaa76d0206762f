"""Checks GPU memory against what the allocators would reserve: more than the live bytes that `verify` checks."""

from collections import defaultdict
from collections.abc import Mapping

from pipedejavu.facts import FaultsError, format_bytes
from pipedejavu.simulate.simulate import Prediction


def check_fit(prediction: Prediction, mapped: Mapping[str, int] | None = None) -> dict[str, float]:
    """Returns the bytes that would be reserved on each GPU; raises FaultsError if one would run out of memory.

    `mapped` are the bytes that ranks map on each GPU for messages, beside what the allocators reserve. CPUs, and
    profiles without sizes of tensors, are not checked. Workers that share a GPU cannot use each other's reserved
    memory.
    """
    program, footprints = prediction.program, prediction.footprints()
    machine, count = program.machine, len(program.workers)
    reserved: dict[str, float] = defaultdict(float)
    for index, name in enumerate(program.devices):
        footprint = footprints[index % count]
        if footprint is not None:
            reserved[name] += footprint.reserved_bytes
    mapped = {name: size for name, size in (mapped or {}).items() if name in reserved}
    for name, size in mapped.items():
        reserved[name] += size
    limits = {name: machine.device(name).memory_bytes - machine.device(name).reserved_bytes for name in reserved}
    short = [name for name in reserved if reserved[name] > limits[name]]
    if not short:
        return dict(reserved)
    worst = max(short, key=lambda name: reserved[name] / max(limits[name], 1))
    peaks = prediction.peaks()
    live = sum(peaks[index % count]["device"] for index, name in enumerate(program.devices) if name == worst)
    others = f" (and {len(short) - 1} more devices have too little)" if len(short) > 1 else ""
    messages = f" and messages of up to {format_bytes(mapped[worst])}" if mapped.get(worst) else ""
    fault = (
        f"the allocator of device '{worst}' would reserve {format_bytes(reserved[worst])} for tensors of"
        f" {format_bytes(live)}{messages}, and the device has {format_bytes(limits[worst])}{others}; use more workers,"
        " smaller microbatches, recompute, or keep state on the host"
    )
    raise FaultsError(f"the program of plan '{program.plan.name}'", [fault])
