"""Compares replicas by checksums: replicas that share every update must have bit-identical weights and state.

Only copies on devices of one model are compared, as other models may round differently. Of state that is divided over
replicas there are no copies; whole weights that are gathered from it are compared. Knows nothing of processes: the
caller passes the function that sums the tables of checksums over all workers.
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
from pipedejavu.engine.optimizer import Tensors
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.sharded_piece import is_sharded
from pipedejavu.engine.threads import held_weights
from pipedejavu.program import Program

CHUNK = 2**18
"""Words of 8 bytes per partial sum: as many as fit into a core's cache."""
_MULTIPLIER = 0x5851F42D4C957F2D
KINDS = ("weights", "optimizer state")

Exchange = Callable[[Tensor], object]
"""Sums a table over all workers, in place."""


class Copy(NamedTuple):
    """One of several copies of a piece."""

    piece: int
    replica: int
    worker: int
    shard: int = 0
    """The worker's part of divided operators."""

    def __str__(self) -> str:
        return f"replica {self.replica} on worker {self.worker}"


class ReplicaCheck:
    """Compares the copies of each piece every `every` updates; 0 for never."""

    def __init__(self, program: Program, job: Job, every: int, update: int = 0):
        """Starts from `update`, at which all copies are equal."""
        self.every, self.agreed = every, update
        self.has_state = program.plan.keep.kind != "server"  # otherwise only the server has state
        copies = list(_copies(program)) if every and not program.plan.feed.is_own else []
        counts = Counter(copy.piece for copy in copies)
        self.copies = [copy for copy in copies if counts[copy.piece] > 1]
        self.names = {piece: _names(program, job, piece) for piece in {copy.piece for copy in self.copies}}

    def is_due(self, update: int, steps: int) -> bool:
        """Whether a comparison falls into the round of `steps` updates that ends with this update."""
        return bool(self.copies) and update // self.every > (update - steps) // self.every

    def find(self, update: int, workers: Sequence[Handlers], exchange: Exchange = lambda _: None) -> str:
        """Returns a sentence that names the copies that differ after an update, or "" if all agree.

        `workers` are those of this process; all processes must make the same call. Synchronises with each device once.
        """
        if not self.copies or update == self.agreed:
            return ""
        width = max(map(len, self.names.values()))
        table = torch.zeros(len(self.copies), 1 + 3 * width, dtype=torch.int64)
        for handlers in workers:
            for row, copy in enumerate(self.copies):
                if copy.worker == handlers.index:
                    self._fill(table[row], handlers, copy)
        exchange(table)
        for piece, names in self.names.items():
            rows = [(copy, row) for copy, row in zip(self.copies, table.tolist(), strict=True) if copy.piece == piece]
            for model in {row[0] for _, row in rows}:
                alike = [(copy, row[1:]) for copy, row in rows if row[0] == model]
                for copies in _comparisons(alike, len(names)):
                    if len({row for _, row in copies}) > 1:
                        return self._sentence(update, names, copies)
        self.agreed = update
        return ""

    def _fill(self, row: Tensor, handlers: Handlers, copy: Copy) -> None:
        key = (copy.piece, copy.replica)
        if (shards := handlers.sharded.get(key)) is not None:
            weights, state = shards.leaves, dict[str, Tensors]()
        else:
            weights, state = held_weights(handlers)[key], handlers.applier.state.get(key, {})
        sums = [checksum([weights[name]], handlers.device) for name in self.names[copy.piece]]
        if self.has_state:
            for name in self.names[copy.piece]:
                slots = state.get(name, {})
                sums.append(checksum([slots[slot] for slot in sorted(slots)], handlers.device))
        row[0] = _model(handlers.device)
        if sums:  # a piece may have no weights
            row[1 : 1 + len(sums)] = torch.stack(sums).to(CPU)
        layouts = handlers.runners[key].layouts
        for column, name in enumerate(self.names[copy.piece]):
            row[1 + len(KINDS) * len(self.names[copy.piece]) + column] = name in layouts

    def _sentence(self, update: int, names: Sequence[str], copies: Sequence[tuple[Copy, tuple[int, ...]]]) -> str:
        """Returns the sentence about the copies that differ: the minority, or all if there is no majority."""
        first = copies[0][1]
        column = next(n for n in range(len(first)) if any(row[n] != first[n] for _, row in copies))
        what = f"{KINDS[column // len(names)]} of '{names[column % len(names)]}'"
        (common, count), *_ = Counter(row for _, row in copies).most_common()
        has_majority = 2 * count > len(copies)
        odd = [copy for copy, row in copies if row != common or not has_majority]
        told = f"{' and '.join(map(str, odd))} {'holds' if len(odd) == 1 else 'hold'}"
        told += f" other {what} than the {count} other replicas" if has_majority else f" different {what}"
        hosts = " and ".join(f"worker {copy.worker}" for copy in odd)
        return (
            f"{told} after update {update}, though replicas that share every update are equal to the bit; they last"
            f" agreed after update {self.agreed}: test the hardware of {hosts}"
        )


def _comparisons(
    rows: Sequence[tuple[Copy, Sequence[int]]], count: int
) -> Iterator[list[tuple[Copy, tuple[int, ...]]]]:
    """Yields the copies that must be equal: of each shard of operators, and of all shards what is not divided.

    A row has the checksums of `count` parameters and of their state, then whether each of them is divided.
    """
    sums = len(KINDS) * count
    for shard in sorted({copy.shard for copy, _ in rows}):
        yield [(copy, tuple(row[:sums])) for copy, row in rows if copy.shard == shard]
    yield [
        (copy, tuple(0 if row[sums + n % count] else value for n, value in enumerate(row[:sums]))) for copy, row in rows
    ]


def checksum(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns a checksum of the tensors' bytes, on a device; a change of one element always changes it.

    It is the sum of all words modulo 2^64, each times its own odd number, so the order of summation does not matter.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        whole = raw.numel() // 8 * 8
        words = raw[:whole] if raw.storage_offset() % 8 == 0 else raw[:whole].clone()
        partial = torch.zeros((), dtype=torch.int64, device=raw.device)
        for part in (*torch.split(words.view(torch.int64), CHUNK), raw[whole:].to(torch.int64)):
            partial = partial * _MULTIPLIER + (part * _odd(part.device)[: part.numel()]).sum()
        total = total * _MULTIPLIER + partial.to(device)
    return total


@cache
def _odd(device: torch.device) -> Tensor:
    """Returns one odd number per word of a chunk, the same in every process."""
    source = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**62), 2**62, (CHUNK,), generator=source, dtype=torch.int64) * 2 + 1).to(device)


def _model(device: torch.device) -> int:
    """Returns a number for what affects rounding: the GPU model, the CPU instruction set and torch's version."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return zlib.crc32(f"{gpu} {torch.backends.cpu.get_cpu_capability()} {torch.__version__}".encode())


def _copies(program: Program) -> Iterator[Copy]:
    """Yields the copies of each piece; weights that are divided over replicas (ZeRO-3) have none."""
    for worker in range(len(program.workers)):
        for piece, replica in pieces_of(program, worker):
            if not (is_sharded(program, piece) and program.plan.zero_of(program.pieces[piece].stage) == 3):
                yield Copy(piece, replica, worker, program.part_of(worker))


def _names(program: Program, job: Job, piece: int) -> list[str]:
    units = [(number, *job.units[number]) for number in program.pieces[piece].units]
    return list(PieceRunner(units, job.seed).initial)
