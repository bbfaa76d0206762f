"""Which workers of a run are alive, and how those that are meet.

Usually the first worker to die ends the run. A server that outlives its workers leads the run instead: it collects the
metrics, completes the checkpoints and knows who is there. The launcher sees a process end and writes that to the store,
so that nothing waits for it any more. Ranks meet through the store, as collectives need all processes.
"""

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from pipedejavu.engine.departure import outlives_workers, replica_of
from pipedejavu.engine.rank_process import RankRun
from pipedejavu.engine.wire import PeerLeftError
from pipedejavu.program import Program

_LOOK_S = 0.002
"""How often a rank that waits for others polls the store."""
_LEAD = "lead"
"""The key of the rank that leads, from the start of the first round to the end of the last."""


class Departure(NamedTuple):
    """A worker that has died while the others go on."""

    worker: int
    signal: str
    at_s: float
    """When the launcher saw it, in seconds since 1970."""
    update: int
    """The last of its updates that the server has made."""
    num_alive: int
    samples: int
    """The samples that it would have trained on up to the end."""
    microbatches: tuple[int, ...]
    """Its microbatches of the first update; those of each further one are as many later."""

    def __str__(self) -> str:
        going_on = "worker goes" if self.num_alive == 1 else "workers go"
        left_out = f", without the {self.samples} samples that were left for it" if self.samples else ""
        return (
            f"worker {self.worker} was ended by {self.signal} at {self._clock()} after update {self.update};"
            f" {self.num_alive} {going_on} on{left_out}"
        )

    def _clock(self) -> str:
        return time.strftime("%H:%M:%S", time.localtime(self.at_s))

    def row(self) -> dict[str, Any]:
        """Returns a row of the metrics."""
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.at_s))
        about = {"worker": self.worker, "signal": self.signal, "at": at, "alive": self.num_alive}
        return {"left": self.update, **about, "samples": self.samples}


def describe_left(left: Mapping[int, int]) -> str:
    """Returns a sentence on the replicas that had left when a checkpoint was saved, for a run that goes on from it."""
    replicas = ", ".join(f"of replica {replica} after update {update}" for replica, update in sorted(left.items()))
    return f"workers had died when the checkpoint was saved ({replicas}); they begin with the weights of the server"


class AllRanks:
    """The ranks of a run that ends with the first of them to die; rank 0 leads."""

    lead = 0
    dead: frozenset[int] = frozenset()

    def follow(self, run: RankRun) -> None:
        """Does nothing."""

    def open(self) -> None:
        """Waits for all ranks."""
        dist.barrier()

    def meet(self, update: int) -> None:  # noqa: ARG002
        """Waits for all ranks after an update."""
        dist.barrier()

    close = meet

    def add_up(self, table: Tensor) -> None:
        """Adds up a table over all ranks, in place."""
        dist.all_reduce(table)

    def is_dead(self, rank: int) -> bool:  # noqa: ARG002
        """Returns False: with such a rank the run would end."""
        return False

    def facts(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of the members: nothing."""
        return {}

    def departures(self, steps: int) -> Iterator[Departure]:  # noqa: ARG002
        """Yields nothing."""
        yield from ()


class LivingRanks:
    """One rank of a run whose server, the last rank, outlives its workers and leads."""

    def __init__(self, store: Store, rank: int, program: Program):
        self.store, self.rank, self.program = PrefixStore("members", store), rank, program
        self.lead = len(program.workers) - 1
        self.replicas = {worker: replica_of(program, worker) for worker in range(self.lead)}
        self.left: dict[int, int] = {}
        """Replicas that have left, with the last of their updates: the table in the log of this rank's worker."""
        self._update = self._meetings = 0
        self._told: set[int] = set()

    @property
    def dead(self) -> frozenset[int]:
        """The ranks whose replicas have left."""
        return frozenset(worker for worker, replica in self.replicas.items() if replica in self.left)

    def follow(self, run: RankRun) -> None:
        """Lets a server go on without workers that die, and follows its log."""
        self.left = run.handlers.log.left
        run.wire.outlives_peers = self.rank == self.lead

    def open(self) -> None:
        """Waits for all ranks before the first round; from now on the others outlive a worker."""
        self._meet(lambda: self.store.set(_LEAD, str(self.lead)))

    def meet(self, update: int) -> None:
        """Waits for all living ranks after an update; then they all know which replicas have left."""
        self._update = update
        self._meet()

    def close(self, update: int) -> None:
        """Waits for all living ranks after the last round; from now on the run needs each of them."""
        self._update = update
        self._meet(lambda: self.store.delete_key(_LEAD))

    def add_up(self, table: Tensor) -> None:
        """Adds up a table over all living ranks, in place; raises PeerLeftError on all if one has died on the way."""
        before = self.dead
        parts = self._meet(note=table.tolist())
        if self.dead != before:
            raise PeerLeftError
        table.copy_(table.new_tensor(parts).sum(0))

    def is_dead(self, rank: int) -> bool:
        """Whether the process of a rank has ended."""
        return self.store.check([f"dead/{rank}"])

    def facts(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps, on the lead: who has left."""
        return {"left": self.left} if self.left else {}

    def departures(self, steps: int) -> Iterator[Departure]:
        """Yields, on the lead, each worker that has died since the last call, in a run of so many steps."""
        for worker, replica in self.replicas.items() if self.rank == self.lead else ():
            if worker in self._told or replica not in self.left or not self.is_dead(worker):
                continue
            self._told.add(worker)
            number, at_s = json.loads(self.store.get(f"dead/{worker}"))
            update = self.left[replica]
            samples = sum(self.program.parts[replica]) * (steps - update)
            alive = len(self.replicas) - len(self._told)
            microbatches = self.program.fed_by(replica, 0)
            yield Departure(worker, signal.Signals(number).name, at_s, update, alive, samples, microbatches)

    def _meet(self, announce: Callable[[], object] = lambda: None, note: Any = None) -> list[Any]:
        """Waits for all living ranks and returns their notes; the lead announces something before they go on."""
        number, self._meetings = self._meetings, self._meetings + 1
        if self.rank != self.lead:
            self.store.set(f"{number}/{self.rank}", json.dumps(note))
            while not self.store.check([f"{number}/go"]):
                time.sleep(_LOOK_S)
            left, notes = json.loads(self.store.get(f"{number}/go"))
            self.left.update(left)
            return list(notes)
        notes = [text for worker in self.replicas for text in self._notes(f"{number}/{worker}", worker)]
        notes.append(note)
        announce()
        self.store.set(f"{number}/go", json.dumps([[*self.left.items()], notes]))
        self.store.delete_key(f"{number - 1}/go")  # all that live have read it, as they have come here
        return notes

    def _notes(self, key: str, worker: int) -> Iterator[Any]:
        """Waits for a worker's note at a meeting; there is none, and its replica has left, if it dies before."""
        while not self.store.check([key]):
            if self.is_dead(worker) and not self.store.check([key]):
                self.left.setdefault(self.replicas[worker], self._update)
                return
            time.sleep(_LOOK_S)
        note = json.loads(self.store.get(key))
        self.store.delete_key(key)
        yield note


Members = AllRanks | LivingRanks


def members_of(store: Store, rank: int, program: Program) -> Members:
    """Returns what a rank that our launcher started knows of the others."""
    return LivingRanks(store, rank, program) if outlives_workers(program) else AllRanks()


class Obituary:
    """The launcher's part: notes which workers have died, if the others go on without them."""

    def __init__(self, store: Store):
        self.store = PrefixStore("members", PrefixStore("run", store))
        self.workers: set[int] = set()
        """The workers that have died so far and that the others outlive."""

    def note(self, codes: Sequence[int | None]) -> list[int | None]:
        """Looks at the exit codes of all workers, None for one that runs; returns those that the run depends on."""
        for worker, code in enumerate(codes):
            is_killed = code is not None and code < 0 and code != -signal.SIGINT
            if is_killed and worker not in self.workers and self._is_outlived(worker, codes):
                self.workers.add(worker)
                self.store.set(f"dead/{worker}", json.dumps([-(code or 0), time.time()]))
        return self.needed(codes)

    def needed(self, codes: Sequence[int | None]) -> list[int | None]:
        """Returns the exit codes with 0 for each worker that the others outlive."""
        return [0 if worker in self.workers else code for worker, code in enumerate(codes)]

    def _is_outlived(self, worker: int, codes: Sequence[int | None]) -> bool:
        """Whether the server and another worker still run."""
        if not self.store.check([_LEAD]):
            return False
        lead = int(self.store.get(_LEAD))
        alive = {number for number, code in enumerate(codes) if code is None}
        return worker != lead and lead in alive and len(alive) > 1
