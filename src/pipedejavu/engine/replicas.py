"""Replicas that share every update hold equal bits; checksums of weights and optimizer state tell when one does not.

Copies are compared among devices of one model only, as others may round otherwise. Knows nothing of processes: who
compares says how the workers' tables of checksums are added up.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from pipedejavu.engine.device import CPU
from pipedejavu.engine.handlers import Handlers, pieces_of
from pipedejavu.engine.job import Job
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.threads import final_weights
from pipedejavu.program import Program

CHUNK = 2**18
"""Words of 8 bytes that are added up at once: as many as stay in a core's cache."""
_MULTIPLIER = 0x5851F42D4C957F2D
KINDS = ("weights", "optimizer state")

Exchange = Callable[[Tensor], object]
"""Adds up a table over all workers, in place."""


class Copy(NamedTuple):
    """One of several copies of a piece."""

    piece: int
    replica: int
    worker: int

    def __str__(self) -> str:
        return f"replica {self.replica} on worker {self.worker}"


class ReplicaCheck:
    """Compares the copies of each piece, every so many updates; 0 for never."""

    def __init__(self, program: Program, job: Job, every: int, update: int = 0):
        """Takes the update that all begin with."""
        self.every, self.agreed = every, update
        self.has_state = program.plan.keep.kind != "server"  # where a server makes updates only it has state
        copies = list(_copies(program)) if every and program.plan.feed.kind != "own" else []
        counts = Counter(copy.piece for copy in copies)
        self.copies = [copy for copy in copies if counts[copy.piece] > 1]
        self.names = {piece: _names(program, job, piece) for piece in {copy.piece for copy in self.copies}}

    def is_due(self, update: int, steps: int) -> bool:
        """Whether a round of `steps` updates that ends with this one has passed the next comparison."""
        return bool(self.copies) and update // self.every > (update - steps) // self.every

    def find(self, update: int, workers: Sequence[Handlers], exchange: Exchange = lambda _: None) -> str:
        """Returns a sentence that names the copies that differ after an update, or nothing if all agree.

        `workers` are those of this process; all processes must call it alike. Waits for each worker's device once.
        """
        if not self.copies or update == self.agreed:
            return ""
        width = max(map(len, self.names.values()))
        table = torch.zeros(len(self.copies), 1 + 2 * width, dtype=torch.int64)
        for own in workers:
            for row, copy in enumerate(self.copies):
                if copy.worker == own.index:
                    self._fill(table[row], own, copy)
        exchange(table)
        for piece, names in self.names.items():
            rows = [(copy, row) for copy, row in zip(self.copies, table.tolist(), strict=True) if copy.piece == piece]
            for model in {row[0] for _, row in rows}:
                alike = [(copy, tuple(row[1:])) for copy, row in rows if row[0] == model]
                if len({row for _, row in alike}) > 1:
                    return self._sentence(update, names, alike)
        self.agreed = update
        return ""

    def _fill(self, row: Tensor, own: Handlers, copy: Copy) -> None:
        home = (copy.piece, copy.replica)
        weights, state = final_weights(own)[home], own.applier.state.get(home, {})
        sums = [checksum([weights[name]], own.device) for name in self.names[copy.piece]]
        if self.has_state:
            for name in self.names[copy.piece]:
                slots = state.get(name, {})
                sums.append(checksum([slots[slot] for slot in sorted(slots)], own.device))
        row[0] = _model(own.device)
        row[1 : 1 + len(sums)] = torch.stack(sums).to(CPU)

    def _sentence(self, update: int, names: Sequence[str], alike: Sequence[tuple[Copy, tuple[int, ...]]]) -> str:
        """Says which copies differ: the minority, or all if there is no majority."""
        first = alike[0][1]
        column = next(n for n in range(len(first)) if any(row[n] != first[n] for _, row in alike))
        what = f"{KINDS[column // len(names)]} of '{names[column % len(names)]}'"
        (common, count), *_ = Counter(row for _, row in alike).most_common()
        has_majority = 2 * count > len(alike)
        odd = [copy for copy, row in alike if row != common or not has_majority]
        told = f"{' and '.join(map(str, odd))} {'holds' if len(odd) == 1 else 'hold'}"
        told += f" other {what} than the {count} other replicas" if has_majority else f" different {what}"
        hosts = " and ".join(f"worker {copy.worker}" for copy in odd)
        return (
            f"{told} after update {update}, though replicas that share every update are equal to the bit; they last"
            f" agreed after update {self.agreed}: test the hardware of {hosts}"
        )


def checksum(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns a checksum of some tensors' bytes, on a device; one element that changes always changes it.

    Adds up words modulo 2^64, each times an odd number of its own, so that no order of adding up matters.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        whole = raw.numel() // 8 * 8
        words = raw[:whole] if raw.storage_offset() % 8 == 0 else raw[:whole].clone()
        found = torch.zeros((), dtype=torch.int64, device=raw.device)
        for part in (*torch.split(words.view(torch.int64), CHUNK), raw[whole:].to(torch.int64)):
            found = found * _MULTIPLIER + (part * _odd(part.device)[: part.numel()]).sum()
        total = total * _MULTIPLIER + found.to(device)
    return total


@cache
def _odd(device: torch.device) -> Tensor:
    """Returns an odd number for each word of a chunk, the same in every process."""
    source = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**62), 2**62, (CHUNK,), generator=source, dtype=torch.int64) * 2 + 1).to(device)


def _model(device: torch.device) -> int:
    """Returns a number for what may round otherwise: a GPU's name, the instructions of CPU kernels, torch's version."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return zlib.crc32(f"{gpu} {torch.backends.cpu.get_cpu_capability()} {torch.__version__}".encode())


def _copies(program: Program) -> Iterator[Copy]:
    for worker in range(len(program.workers)):
        for piece, replica in pieces_of(program, worker):
            yield Copy(piece, replica, worker)


def _names(program: Program, job: Job, piece: int) -> list[str]:
    units = [(number, *job.units[number]) for number in program.pieces[piece].units]
    return list(PieceRunner(units, job.seed).initial)
