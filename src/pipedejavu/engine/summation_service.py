"""The summation service between processes: chunks of a vector are pushed, summed on one machine each, and pulled.

    trainer      push chunks ──▶                     ──▶ pull sums
    trainer      push chunks ──▶  summing machine    ──▶ pull sums
                                  adds in the order
                                  of the trainers

Chunks follow each other, so that pushes, sums and pulls of different chunks overlap in both directions of every
interface. All sums have the bits of the trainers' vectors added one after the other; 16 bits are added in float32.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from pipedejavu.program.summation import chunks_of, summed_runs
from pipedejavu.runtime.memory_group import sum_in_order
from pipedejavu.runtime.traffic import Traffic

WINDOW = 4
"""Chunks whose receives a summing machine posts ahead. Gloo sends only what is posted, so this keeps the trainers at
the same chunks, whatever share of the interface each connection gets."""
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HEADER, _FIRST = 0, 1
"""Tags: of the size and format of a vector, and of its first chunk."""

Posted = tuple[range, int, list[Tensor], list[dist.Work]]
"""A chunk, its number, and the receives of the trainers' parts."""


class SummationService:
    """One process's end of a service; all members make it together."""

    def __init__(self, name: str, trainers: Sequence[int], helpers: Sequence[int], rank: int, carried: Traffic):
        self.name, self.rank, self.carried = name, rank, carried
        self.trainers, self.machines = list(trainers), [*trainers, *helpers]
        self.helpers = list(helpers)
        self.group = dist.new_group(self.machines)
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def push_pull(self, vector: Tensor) -> Tensor:
        """Returns the sum of the trainers' vectors."""
        vector = vector.detach().contiguous()
        out = torch.empty_like(vector)
        if self.rank == self.trainers[0]:
            header = torch.tensor([vector.numel(), _DTYPES.index(vector.dtype)])
            for helper in self.helpers:
                self._send(header, helper, _HEADER)
        pulled = []
        for machine, number, chunk in self._chunks(vector.numel(), vector.itemsize):
            if machine != self.rank:
                pulled.append(self._receive(out[chunk.start : chunk.stop], machine, number))
                self._send(vector[chunk.start : chunk.stop], machine, number)
        self._sum(vector.numel(), vector.dtype, vector, out)
        for work in pulled:
            work.wait()
        self._flush()
        return out

    def serve(self) -> None:
        """Sums the chunks of one vector that fall to this helper."""
        header = torch.zeros(2, dtype=torch.int64)
        self._receive(header, self.trainers[0], _HEADER).wait()
        numel, dtype = header.tolist()
        self._sum(numel, _DTYPES[dtype], None, None)
        self._flush()

    def _chunks(self, numel: int, itemsize: int) -> Iterator[tuple[int, int, range]]:
        """Yields (machine, number, chunk), the first of every machine, then the second of every machine, and so on."""
        runs = summed_runs(numel, len(self.trainers), len(self.helpers))
        number = _FIRST
        for row in zip_longest(*(chunks_of(run, itemsize) for run in runs)):
            for machine, chunk in zip(self.machines, row, strict=True):
                if chunk is not None:
                    yield machine, number, chunk
                number += 1

    def _sum(self, numel: int, dtype: torch.dtype, vector: Tensor | None, out: Tensor | None) -> None:
        """Sums this machine's chunks and sends each sum to the trainers; into `out` if this is one of them."""
        others = [trainer for trainer in self.trainers if trainer != self.rank]
        mine = iter([(n, c) for machine, n, c in self._chunks(numel, dtype.itemsize) if machine == self.rank])
        posted: deque[Posted] = deque()

        def post() -> None:
            for number, chunk in mine:
                parts = [torch.empty(len(chunk), dtype=dtype) for _ in others]
                works = [self._receive(p, trainer, number) for p, trainer in zip(parts, others, strict=True)]
                posted.append((chunk, number, parts, works))
                return

        for _ in range(WINDOW):
            post()
        while posted:
            chunk, number, parts, works = posted.popleft()
            for work in works:
                work.wait()
            post()
            if vector is not None:
                parts.insert(self.trainers.index(self.rank), vector[chunk.start : chunk.stop])
            total = sum_in_order(parts, None if out is None else out[chunk.start : chunk.stop])
            for trainer in others:
                self._send(total, trainer, number)

    def _send(self, tensor: Tensor, to: int, tag: int) -> None:
        work = dist.isend(tensor.view(torch.uint8), to, group=self.group, tag=tag)
        assert work is not None, "this process is a member of the group"
        self._sent.append((work, tensor))
        self.carried.send(self.name, 1, tensor.nbytes)

    def _receive(self, tensor: Tensor, source: int, tag: int) -> dist.Work:
        work = dist.irecv(tensor.view(torch.uint8), source, group=self.group, tag=tag)
        assert work is not None, "this process is a member of the group"
        return work

    def _flush(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
