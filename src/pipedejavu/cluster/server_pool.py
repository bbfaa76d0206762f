"""What is free on the servers of a cluster, and where a share of them is placed.

Rules of packing: `first` that fits, `best` fit (least left over), `spread` (most left over), and `fragments` (least
growth of GPU time that the usual jobs of the queue could not use, after FGD).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipedejavu.cluster.cluster_job import ANY_KIND, MILLI, Share
from pipedejavu.cluster.server import Server

PACKINGS = ("first", "best", "spread", "fragments")


class ServerPart(NamedTuple):
    """A job's part of one server."""

    server: int
    slots: tuple[int, ...]
    """Numbers of its GPUs."""
    gpu_milli: int
    """Of each of these GPUs."""
    cores_milli: int
    memory_bytes: int


class Total(NamedTuple):
    """Resources of all servers of a kind together."""

    gpu_milli: int
    cores_milli: int
    memory_bytes: int

    def covers(self, share: Share) -> bool:
        """Whether a share fits, if it could be divided at will."""
        return all(need <= have for need, have in zip(share[1:4], self, strict=True))

    def without(self, share: Share) -> "Total":
        """Returns what a share leaves."""
        return Total(
            self.gpu_milli - share.gpu_milli,
            self.cores_milli - share.cores_milli,
            self.memory_bytes - share.memory_bytes,
        )


class JobShape(NamedTuple):
    """A size of job that is usual in a queue, and how many jobs have it, as a share of all."""

    gpu_milli: int
    cores_milli: int
    memory_bytes: int
    weight: float


class ServerPool:
    """Free resources by server; raises nothing, and never gives out more than there is."""

    def __init__(self, servers: Sequence[Server], packing: str = "best", usual: Sequence[JobShape] = ()):
        self.servers = list(servers)
        self.packing, self.usual = packing, usual
        most = max((server.gpus for server in servers), default=0)
        slots = np.arange(max(most, 1))
        num = np.array([server.gpus for server in servers], dtype=np.int64)
        self.gpus: NDArray[np.int64] = np.where(slots[None, :] < num[:, None], MILLI, 0)
        self.cores = np.array([server.cores_milli for server in servers], dtype=np.int64)
        self.memory = np.array([server.memory_bytes for server in servers], dtype=np.int64)
        self.is_on = np.array([not server.is_rented for server in servers], dtype=bool)
        self._all = self.gpus.copy(), self.cores.copy(), self.memory.copy()
        kinds = np.array([server.kind for server in servers])
        self._of_kind = {kind: kinds == kind for kind in set(kinds.tolist())}

    def copy(self) -> "ServerPool":
        """Returns a pool with the same free resources."""
        other = ServerPool.__new__(ServerPool)
        other.__dict__.update(self.__dict__)
        other.gpus, other.cores, other.memory = self.gpus.copy(), self.cores.copy(), self.memory.copy()
        other.is_on = self.is_on.copy()
        return other

    def only(self, server: int) -> "ServerPool":
        """Returns a copy in which one server is on."""
        other = self.copy()
        other.is_on[:] = False
        other.is_on[server] = True
        return other

    def num_on(self, kind: str) -> int:
        """Returns how many servers of a kind are on."""
        return int((self._mask(kind) & self.is_on).sum())

    def num_of(self, kind: str) -> int:
        """Returns how many servers of a kind there are."""
        return int(self._mask(kind).sum())

    def capacity(self, kind: str) -> Total:
        """Returns what the servers of a kind that are on have, free or not."""
        is_counted = self._mask(kind) & self.is_on
        return Total(*(int(sizes[is_counted].sum()) for sizes in self._all))

    def is_empty(self, server: int) -> bool:
        """Whether nothing of a server is given out."""
        gpus, cores, memory = self._all
        return bool(
            (self.gpus[server] == gpus[server]).all()
            and self.cores[server] == cores[server]
            and self.memory[server] == memory[server]
        )

    def find(self, share: Share) -> list[ServerPart] | None:
        """Returns where a share can be placed now; None if it fits nowhere.

        More GPUs than a server has are divided evenly over as few servers as possible.
        """
        most = int(self._all[0][self._mask(share.kind)].sum(axis=1).max(initial=0)) // MILLI
        count = -(-share.gpu_milli // (MILLI * most)) if most and share.gpu_milli else 1
        whole = share.gpu_milli // MILLI
        while count > 1 and whole % count:
            count += 1
        part = share._replace(
            gpu_milli=share.gpu_milli // count,
            cores_milli=-(-share.cores_milli // count),
            memory_bytes=-(-share.memory_bytes // count),
        )
        rows = self._fitting(part)
        if len(rows) < count:
            return None
        if count == 1:
            return [self._part(self._choose(rows, part), part)]
        return [self._part(int(row), part) for row in rows[:count]]

    def _mask(self, kind: str) -> NDArray[np.bool_]:
        if kind == ANY_KIND:
            return np.ones(len(self.servers), dtype=bool)
        mask: NDArray[np.bool_] = self._of_kind.get(kind, np.zeros(len(self.servers), dtype=bool))
        return mask

    def _fitting(self, part: Share) -> NDArray[np.int64]:
        fits = (
            self._mask(part.kind) & self.is_on & (self.cores >= part.cores_milli) & (self.memory >= part.memory_bytes)
        )
        rows = np.flatnonzero(fits)
        if part.gpu_milli:
            rows = rows[_has_gpus(self.gpus[rows], part.gpu_milli)]
        return rows

    def _choose(self, rows: NDArray[np.int64], part: Share) -> int:
        if self.packing == "first" or len(rows) == 1:
            return int(rows[0])
        if self.packing == "fragments":
            grown = self._fragments(rows, part) - self._fragments(rows, None)
            rows = rows[grown <= grown.min() + 1e-9]
        gpus, cores, memory = self._all
        left = (self.cores[rows] - part.cores_milli) / np.maximum(cores[rows], 1)
        left = left + (self.memory[rows] - part.memory_bytes) / np.maximum(memory[rows], 1)
        left = left + 2 * (self.gpus[rows].sum(axis=1) - part.gpu_milli) / max(int(gpus.sum(axis=1).max()), 1)
        return int(rows[np.argmax(left) if self.packing == "spread" else np.argmin(left)])

    def _fragments(self, rows: NDArray[np.int64], part: Share | None) -> NDArray[np.float64]:
        """Returns the thousandths of GPUs on each server that the usual jobs could not use, after placing a part."""
        gpus, cores, memory = self.gpus[rows], self.cores[rows], self.memory[rows]
        if part is not None:
            gpus = _after(gpus, part.gpu_milli)
            cores, memory = cores - part.cores_milli, memory - part.memory_bytes
        total = np.zeros(len(rows))
        free = gpus.sum(axis=1)
        for shape in self.usual:
            usable = np.where(gpus >= min(shape.gpu_milli, MILLI), gpus, 0).sum(axis=1) if shape.gpu_milli else 0 * free
            fits = (cores >= shape.cores_milli) & (memory >= shape.memory_bytes) & (usable >= shape.gpu_milli)
            total += shape.weight * np.where(fits, free - usable, free)
        return total

    def _part(self, server: int, part: Share) -> ServerPart:
        free = self.gpus[server]
        if part.gpu_milli < MILLI:
            fitting = [slot for slot in range(len(free)) if free[slot] >= part.gpu_milli]
            slots = (min(fitting, key=lambda slot: (free[slot], slot)),) if part.gpu_milli else ()
            return ServerPart(server, slots, part.gpu_milli, part.cores_milli, part.memory_bytes)
        whole = np.flatnonzero(free == MILLI)[: part.gpu_milli // MILLI]
        return ServerPart(server, tuple(whole.tolist()), MILLI, part.cores_milli, part.memory_bytes)

    def take(self, parts: Sequence[ServerPart]) -> None:
        """Gives parts of servers out."""
        self._add(parts, -1)

    def give(self, parts: Sequence[ServerPart]) -> None:
        """Takes parts of servers back."""
        self._add(parts, 1)

    def _add(self, parts: Sequence[ServerPart], sign: int) -> None:
        for part in parts:
            for slot in part.slots:
                self.gpus[part.server, slot] += sign * part.gpu_milli
            self.cores[part.server] += sign * part.cores_milli
            self.memory[part.server] += sign * part.memory_bytes


def _has_gpus(gpus: NDArray[np.int64], gpu_milli: int) -> NDArray[np.bool_]:
    if gpu_milli < MILLI:
        return np.asarray((gpus >= gpu_milli).any(axis=1))
    return np.asarray((gpus == MILLI).sum(axis=1) >= gpu_milli // MILLI)


def _after(gpus: NDArray[np.int64], gpu_milli: int) -> NDArray[np.int64]:
    """Returns the free GPUs of servers after each gave out as many: the fullest that fits, or whole ones."""
    gpus = gpus.copy()
    if not gpu_milli:
        return gpus
    if gpu_milli < MILLI:
        slots = np.where(gpus >= gpu_milli, gpus, 2 * MILLI).argmin(axis=1)
        gpus[np.arange(len(gpus)), slots] -= gpu_milli
        return gpus
    is_whole = gpus == MILLI
    return np.where(is_whole & (is_whole.cumsum(axis=1) <= gpu_milli // MILLI), 0, gpus)
