"""The memory that ranks of one host map to exchange tensors: an upper bound, from the program alone.

Each channel has slots of its largest message, in the memory of the sender: on its GPU if both ends are GPUs, else on
the host. Each member of a group has two regions for sums. Workers that are threads of one process map nothing.
"""

from collections import defaultdict
from typing import NamedTuple

from pipedejavu.analysis.size import Sizes
from pipedejavu.facts import format_bytes
from pipedejavu.facts.message_memory import MOST_SLOTS, PART_BYTES, paged
from pipedejavu.program.action import SEND
from pipedejavu.program.program import Program


class MappedBytes(NamedTuple):
    """Bytes of mapped memory."""

    gpus: dict[str, int]
    """By name of a GPU; those that map nothing are left out."""
    hosts: dict[str, int]
    """By name of a host."""

    def __str__(self) -> str:
        parts = [f"{format_bytes(size)} of '{name}'" for some in self for name, size in sorted(some.items())]
        return f"messages between ranks take up to {' and '.join(parts)}" if parts else ""


def mapped_bytes(program: Program) -> MappedBytes:
    """Returns the most that the ranks of a program map."""
    sizes, machine = Sizes(program), program.machine
    devices = [machine.device(name) for name in program.devices]
    found = MappedBytes(defaultdict(int), defaultdict(int))

    def add(worker: int, size_bytes: int, *, is_on_gpu: bool) -> None:
        if is_on_gpu:
            found.gpus[devices[worker].name] += size_bytes
        else:
            found.hosts[devices[worker].host] += size_bytes

    largest: dict[str, float] = {}
    for worker, sequence in enumerate(program.workers):
        messages: dict[int, list[float]] = defaultdict(list)
        for a in sequence.actions:
            if a.kind == SEND and devices[a.peer].host == devices[worker].host:
                messages[a.peer].append(sizes.moved(a))
            elif a.group:
                largest[a.group] = max(largest.get(a.group, 0.0), sizes.moved(a))
        for peer, moved in messages.items():
            kind = "gpu" if devices[worker].type == devices[peer].type == "gpu" else "cpu"
            slots = min(MOST_SLOTS[kind], len(moved))
            add(worker, slots * paged(max(moved)), is_on_gpu=kind == "gpu")
    for name, size in largest.items():
        members = program.groups[name].workers
        if len(members) > 1 and len({devices[member].host for member in members}) == 1:
            is_on_gpu = all(devices[member].type == "gpu" for member in members)
            for member in members:
                add(member, 2 * paged(min(size, PART_BYTES)), is_on_gpu=is_on_gpu)
    return MappedBytes(dict(found.gpus), dict(found.hosts))
