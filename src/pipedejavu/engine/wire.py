"""Wires: communication between workers, with one interface for threads of a process and for processes.

A channel carries values from one worker to another, first in, first out. A group has collectives: its members, in the
order of their numbers, have equal runs of the rows of a tensor, unless a table says otherwise. On all wires but NCCL a
scattered sum has the bits of the members' tensors added one after the other. Nothing that arrives is unpickled:
processes exchange raw tensors and, once per kind of value, a header with their shapes.
"""

import json
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipedejavu.engine.collective import all_gather, all_to_all, reduce_scatter
from pipedejavu.engine.summation_service import SummationService
from pipedejavu.program.summation import summed_runs
from pipedejavu.runtime.memory_group import sum_in_order
from pipedejavu.runtime.traffic import Counts, Traffic, even_counts

Key = tuple[object, ...]
"""What determines the shapes of a message: the value's kind and piece, and the samples of the microbatch."""


MAX_IN_FLIGHT = 4
"""Sends of a channel that may be in flight; each keeps its tensor in memory."""


HELPED = "+helpers"
"""Added to the name of a group for its meeting with its helpers."""


class WireStoppedError(Exception):
    """Another worker has failed, so this one stops."""


class PeerLeftError(Exception):
    """The worker at the other end has died, and this one goes on without it."""


class Wire(Protocol):
    """One worker's end of all channels and groups."""

    def send(self, tensors: tuple[Tensor, ...], to: int, key: Key) -> None:
        """Sends tensors to a worker without waiting for it to receive them."""

    def expect(self, source: int, key: Key) -> None:
        """Announces the key after the next one from a worker, so that its receive can be posted early."""

    def receive(self, source: int, key: Key) -> tuple[Tensor, ...]:
        """Returns the next tensors from a worker."""

    def add_up(self, tensor: Tensor, group: str) -> Tensor:
        """Returns the sum of the members' tensors."""

    def push_pull(self, vector: Tensor, group: str) -> Tensor:
        """Returns the sum of the members' vectors, with the help of the servers of the group."""

    def serve(self, group: str) -> None:
        """Sums a part of the vectors that the members of a group push, on a server that helps them."""

    def reduce_scatter(self, vector: Tensor, group: str) -> Tensor:
        """Returns this member's rows of the sum of the members' tensors, which the members divide evenly."""

    def all_gather(self, run: Tensor, group: str, out: Tensor | None = None) -> Tensor:
        """Returns the rows of all members, who have equally many, one member after the other; in `out` if given.

        The member's own rows may be in their place in `out`.
        """

    def all_to_all(self, rows: Tensor, group: str, counts: Counts | None = None) -> Tensor:
        """Sends rows to each member, in their order; returns the rows that the members sent to this one.

        `counts[i][j]` is the number of rows from the i-th member to the j-th; by default all are equal.
        """

    def traffic(self) -> tuple[int, int]:
        """Returns the messages and bytes that this worker has sent."""

    def is_issued(self, lane: str) -> bool:
        """Whether what a lane transfers is issued to its stream, so that the lane's thread need not wait for it."""

    def flush(self) -> None:
        """Waits until all sends are complete."""

    def stop(self) -> None:
        """Tells the other workers that this one has failed."""


@dataclass
class Exchange:
    """The channels and groups that the threads of one process share."""

    groups: dict[str, tuple[int, ...]]
    helpers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By group, the servers that help it to sum."""
    stopped: threading.Event = field(default_factory=threading.Event)
    channels: dict[tuple[int, int], queue.SimpleQueue[tuple[Tensor, ...]]] = field(default_factory=dict)
    meetings: dict[str, "_Meeting"] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def channel(self, source: int, target: int) -> queue.SimpleQueue[tuple[Tensor, ...]]:
        """Returns the queue between two workers."""
        with self.lock:
            return self.channels.setdefault((source, target), queue.SimpleQueue())

    def meeting(self, group: str) -> "_Meeting":
        """Returns the meeting point of a group; raises WireStoppedError after a worker has failed."""
        with self.lock:
            if self.stopped.is_set():
                raise WireStoppedError
            return self.meetings.setdefault(group, _Meeting(len(self.members(group))))

    def members(self, group: str) -> tuple[int, ...]:
        """Returns the workers of a group, and after them its helpers if that is what its name asks for."""
        name = group.removesuffix(HELPED)
        return self.groups[name] + (self.helpers.get(name, ()) if name != group else ())


class _Meeting:
    """The meeting point of a group: a barrier, and the tensor of each member."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size)
        self.tensors: dict[int, Tensor] = {}


@dataclass(frozen=True)
class ThreadWire:
    """Workers as threads of one process."""

    exchange: Exchange
    worker: int
    carried: Traffic = field(default_factory=Traffic)

    def send(self, tensors: tuple[Tensor, ...], to: int, key: Key) -> None:  # noqa: ARG002
        """Puts the tensors themselves into the channel."""
        self.carried.send(to, len(tensors), sum(t.nbytes for t in tensors))
        self.exchange.channel(self.worker, to).put(tensors)

    def expect(self, source: int, key: Key) -> None:
        """Does nothing: the channel needs no posted receives."""

    def receive(self, source: int, key: Key) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Waits for the next tensors; raises WireStoppedError if a worker fails."""
        channel = self.exchange.channel(source, self.worker)
        while not self.exchange.stopped.is_set():
            try:
                return channel.get(timeout=0.05)
            except queue.Empty:
                continue
        raise WireStoppedError

    def add_up(self, tensor: Tensor, group: str) -> Tensor:
        """Sums in the order of the workers, so that all members get the same bits."""
        self.carried.add_up(group, self._size(group), tensor)
        return self._meet(tensor, group, lambda tensors: torch.stack(tensors).sum(0))

    def push_pull(self, vector: Tensor, group: str) -> Tensor:
        """Sums one run on each member and helper, in the order of the workers; joins the runs."""
        run = self._sum_run(vector, group)
        count = len(self.exchange.groups[group]) - 1
        self.carried.send(group, count, vector.nbytes - run.nbytes + count * run.nbytes)
        return self._meet(run, group + HELPED, torch.cat)

    def serve(self, group: str) -> None:
        """Sums this helper's run."""
        run = self._sum_run(torch.zeros(0), group)
        count = len(self.exchange.groups[group])
        self.carried.send(group, count, count * run.nbytes)
        self._meet(run, group + HELPED, lambda _: run)

    def _sum_run(self, vector: Tensor, group: str) -> Tensor:
        members = sorted(self.exchange.members(group + HELPED))
        trainers = len(self.exchange.groups[group])

        def sum_run(tensors: list[Tensor]) -> Tensor:
            runs = summed_runs(tensors[0].numel(), trainers, len(members) - trainers)
            run = runs[members.index(self.worker)]
            return sum_in_order([tensor[run.start : run.stop] for tensor in tensors[:trainers]])

        return self._meet(vector, group + HELPED, sum_run)

    def reduce_scatter(self, vector: Tensor, group: str) -> Tensor:
        """Sums in the order of the workers."""
        size, position = self._size(group), self._position(group)
        self.carried.reduce_scatter(group, size, vector)
        return self._meet(vector, group, lambda all_: sum_in_order([v.chunk(size)[position] for v in all_]))

    def all_gather(self, run: Tensor, group: str, out: Tensor | None = None) -> Tensor:
        """Joins the members' rows."""
        size, position = self._size(group), self._position(group)
        self.carried.all_gather(group, size, run)
        whole = run.new_empty((len(run) * size, *run.shape[1:])) if out is None else out

        def join(tensors: list[Tensor]) -> Tensor:
            for n, (place, rows) in enumerate(zip(whole.chunk(size) if len(run) else (), tensors, strict=False)):
                if n != position or place.data_ptr() != rows.data_ptr():
                    place.copy_(rows)
            return whole

        return self._meet(run, group, join)

    def all_to_all(self, rows: Tensor, group: str, counts: Counts | None = None) -> Tensor:
        """Joins the rows for this member."""
        table, position = counts or even_counts(self._size(group), len(rows)), self._position(group)
        self.carried.all_to_all(group, position, rows, table)
        return self._meet(
            rows, group, lambda all_: torch.cat([torch.split(r, n)[position] for r, n in zip(all_, table, strict=True)])
        )

    def traffic(self) -> tuple[int, int]:
        """Returns what other threads have been given."""
        return self.carried.total()

    def _size(self, group: str) -> int:
        return len(self.exchange.groups[group])

    def _position(self, group: str) -> int:
        return sorted(self.exchange.groups[group]).index(self.worker)

    def _meet(self, tensor: Tensor, group: str, call: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Returns the result of a call with the tensors of all members, none of which changes until all have called."""
        meeting = self.exchange.meeting(group)
        meeting.tensors[self.worker] = tensor.detach()
        try:
            meeting.barrier.wait()
            result = call([meeting.tensors[w] for w in sorted(meeting.tensors)])
            meeting.barrier.wait()
        except threading.BrokenBarrierError:
            raise WireStoppedError from None
        return result

    def is_issued(self, lane: str) -> bool:  # noqa: ARG002
        """Returns False: a transfer has ended when the call returns."""
        return False

    def flush(self) -> None:
        """Does nothing: sends complete at once."""

    def stop(self) -> None:
        """Wakes all other workers that wait."""
        with self.exchange.lock:
            self.exchange.stopped.set()
            for meeting in self.exchange.meetings.values():
                meeting.barrier.abort()


class ProcessWire:
    """Workers as processes under torch.distributed."""

    def __init__(self, worker: int, groups: dict[str, tuple[int, ...]]):
        self.worker = worker
        # torch.distributed requires every process to create every group, in the same order.
        self.groups = {name: dist.new_group(list(workers)) for name, workers in sorted(groups.items())}
        self.sent: dict[tuple[int, Key], str] = {}
        self._in_flight: dict[int, deque[tuple[dist.Work, Tensor]]] = {}
        """By channel, sends that may not be complete, with their tensors."""
        self.carried = Traffic()
        self.services: dict[str, SummationService] = {}
        """By group, the service of its helpers, if this process is a trainer or a helper of it."""
        self.known: dict[tuple[int, Key], list[tuple[list[int], str]]] = {}
        self._expected: dict[int, Key] = {}
        """By channel, the key of the message that follows the one about to be received."""
        self._coming: dict[int, deque[list[tuple[dist.Work, Tensor]]]] = {}
        """By channel, posted receives: Gloo sends at once to a posted receive, and needs a round trip otherwise."""

    def send(self, tensors: tuple[Tensor, ...], to: int, key: Key) -> None:
        """Sends a header the first time that a key is used on the channel, then the tensors."""
        if (to, key) not in self.sent:
            header = json.dumps([[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in tensors])
            self.sent[to, key] = header
            raw = torch.frombuffer(bytearray(header.encode()), dtype=torch.uint8)
            self._put(torch.tensor([len(raw)]), to)
            self._put(raw, to)
        for tensor in tensors:
            # A complex tensor may be a lazy conjugate or negative of its memory.
            self._put(tensor.detach().resolve_conj().resolve_neg().contiguous(), to)

    def _put(self, tensor: Tensor, to: int) -> None:
        in_flight = self._in_flight.setdefault(to, deque())
        if len(in_flight) == MAX_IN_FLIGHT:
            in_flight.popleft()[0].wait()
        work = dist.isend(tensor, to)
        assert work is not None, "this process is a member of the default group"
        in_flight.append((work, tensor))
        self.carried.send(to, 1, tensor.nbytes)

    def is_issued(self, lane: str) -> bool:  # noqa: ARG002
        """Returns False: Gloo sends from the host."""
        return False

    def flush(self) -> None:
        """Waits for all sends."""
        for in_flight in self._in_flight.values():
            while in_flight:
                in_flight.popleft()[0].wait()

    def traffic(self) -> tuple[int, int]:
        """Returns the messages and bytes that this worker has sent; a sum counts as a ring all-reduce."""
        return self.carried.total()

    def expect(self, source: int, key: Key) -> None:
        """Notes the key for the next receive."""
        self._expected[source] = key

    def receive(self, source: int, key: Key) -> tuple[Tensor, ...]:
        """Receives a header the first time that a key is used on the channel, then the tensors."""
        if (source, key) not in self.known:
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, source)
            raw = torch.zeros(int(size), dtype=torch.uint8)
            dist.recv(raw, source)
            self.known[source, key] = json.loads(bytes(raw.tolist()))
        coming, following = self._coming.setdefault(source, deque()), self._expected.pop(source, None)
        if not coming:
            coming.append(self._post(source, key))
        if following is not None and (source, following) in self.known:
            coming.append(self._post(source, following))
        posted = coming.popleft()
        for work, _ in posted:
            work.wait()
        return tuple(tensor for _, tensor in posted)

    def _post(self, source: int, key: Key) -> list[tuple[dist.Work, Tensor]]:
        posted = []
        for shape, dtype in self.known[source, key]:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            work = dist.irecv(tensor, source)
            assert work is not None, "this process is a member of the default group"
            posted.append((work, tensor))
        return posted

    def add_up(self, tensor: Tensor, group: str) -> Tensor:
        """Sums over the members' processes."""
        dist.all_reduce(tensor, group=self.groups[group])
        self.carried.add_up(group, self.groups[group].size(), tensor)
        return tensor

    def push_pull(self, vector: Tensor, group: str) -> Tensor:
        """Sums over the members' processes, chunk by chunk."""
        return self.services[group].push_pull(vector)

    def serve(self, group: str) -> None:
        """Sums this helper's chunks."""
        self.services[group].serve()

    def reduce_scatter(self, vector: Tensor, group: str) -> Tensor:
        """Sums over the members' processes."""
        self.carried.reduce_scatter(group, self.groups[group].size(), vector)
        return reduce_scatter(vector, self.groups[group])

    def all_gather(self, run: Tensor, group: str, out: Tensor | None = None) -> Tensor:
        """Gathers from the members' processes."""
        self.carried.all_gather(group, self.groups[group].size(), run)
        return all_gather(run, self.groups[group], out)

    def all_to_all(self, rows: Tensor, group: str, counts: Counts | None = None) -> Tensor:
        """Exchanges rows with the members' processes."""
        members = self.groups[group]
        table = counts or even_counts(members.size(), len(rows))
        self.carried.all_to_all(group, members.rank(), rows, table)
        return all_to_all(rows, members, table)

    def stop(self) -> None:
        """Does nothing: peers notice that this process ends."""


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Returns all elements of some tensors in one vector, which is float32 if they have 16 bits."""
    wide = [t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for t in tensors]
    return torch.cat([t.reshape(-1) for t in wide]) if wide else torch.zeros(0)


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Divides a vector into tensors with the shapes and formats of `like`."""
    parts = torch.split(vector, [t.numel() for t in like])
    return [part.view_as(t).to(t.dtype) for part, t in zip(parts, like, strict=True)]
