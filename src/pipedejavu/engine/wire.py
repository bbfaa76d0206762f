"""Wires: how values pass between workers. One interface, two kinds: threads of a process, and processes.

A channel carries values from one worker to another, first in, first out; a group sums tensors over its members.
Nothing that arrives is unpickled: processes exchange raw tensors, and once for each kind of value a header that
says their shapes.
"""

import json
import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipedejavu.engine.device import CPU, moved

Key = tuple[object, ...]
"""What decides a message's shapes: the value's kind and piece, and the microbatch's size."""


LEAVING = 4
"""Messages of a channel that may be under way, and keep their memory; the receiver takes them as they come."""


class WireStoppedError(Exception):
    """Another worker has failed, so this one stops."""


class Wire(Protocol):
    """One worker's end of all channels and groups."""

    def send(self, tensors: tuple[Tensor, ...], to: int, key: Key) -> None:
        """Hands tensors to a worker; does not wait for it to take them."""

    def expect(self, source: int, key: Key) -> None:
        """Says what comes behind the next tensors from a worker, so that room is made for it in time."""

    def receive(self, source: int, key: Key) -> tuple[Tensor, ...]:
        """Takes the next tensors from a worker."""

    def add_up(self, tensor: Tensor, group: str) -> Tensor:
        """Returns the sum of the members' tensors."""

    def flush(self) -> None:
        """Waits until all that was handed over has left."""

    def stop(self) -> None:
        """Lets the other workers know that this one has failed."""


@dataclass
class Exchange:
    """What the threads of one process share."""

    groups: dict[str, tuple[int, ...]]
    stopped: threading.Event = field(default_factory=threading.Event)
    channels: dict[tuple[int, int], queue.SimpleQueue[tuple[Tensor, ...]]] = field(default_factory=dict)
    meetings: dict[str, "_Meeting"] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def channel(self, source: int, target: int) -> queue.SimpleQueue[tuple[Tensor, ...]]:
        """Returns the queue between two workers."""
        with self.lock:
            return self.channels.setdefault((source, target), queue.SimpleQueue())

    def meeting(self, group: str) -> "_Meeting":
        """Returns where a group meets; raises StoppedError where nobody will come any more."""
        with self.lock:
            if self.stopped.is_set():
                raise WireStoppedError
            return self.meetings.setdefault(group, _Meeting(len(self.groups[group])))


class _Meeting:
    """Where the members of a group meet; sums in the order of the members, so that all get the same bits."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size)
        self.given: dict[int, Tensor] = {}


@dataclass(frozen=True)
class ThreadWire:
    """Workers as threads of one process."""

    exchange: Exchange
    worker: int

    def send(self, tensors: tuple[Tensor, ...], to: int, key: Key) -> None:  # noqa: ARG002
        """Hands tensors over as they are."""
        self.exchange.channel(self.worker, to).put(tensors)

    def expect(self, source: int, key: Key) -> None:
        """Needs nothing: what is handed over is there."""

    def receive(self, source: int, key: Key) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Waits for the next tensors, or for the news that a worker has failed."""
        channel = self.exchange.channel(source, self.worker)
        while not self.exchange.stopped.is_set():
            try:
                return channel.get(timeout=0.05)
            except queue.Empty:
                continue
        raise WireStoppedError

    def add_up(self, tensor: Tensor, group: str) -> Tensor:
        """Sums in the order of the workers, on every member alike."""
        meeting = self.exchange.meeting(group)
        meeting.given[self.worker] = tensor
        try:
            meeting.barrier.wait()
            total = torch.stack([meeting.given[w] for w in sorted(meeting.given)]).sum(0)
            meeting.barrier.wait()
        except threading.BrokenBarrierError:
            raise WireStoppedError from None
        return total

    def flush(self) -> None:
        """Returns at once: what is handed over is there."""

    def stop(self) -> None:
        """Wakes all other workers, wherever they wait."""
        with self.exchange.lock:
            self.exchange.stopped.set()
            for meeting in self.exchange.meetings.values():
                meeting.barrier.abort()


class ProcessWire:
    """Workers as processes under torch.distributed."""

    def __init__(self, worker: int, groups: dict[str, tuple[int, ...]]):
        self.worker = worker
        # Every process makes every group, in one order, as torch.distributed asks.
        self.groups = {name: dist.new_group(list(workers)) for name, workers in sorted(groups.items())}
        self.sent: dict[tuple[int, Key], str] = {}
        self._leaving: dict[int, deque[tuple[dist.Work, Tensor]]] = {}
        """By channel, sends that may still be under way, with what they send."""
        self._carried: dict[object, tuple[int, int]] = {}
        """Messages and bytes of each channel and group, whose one lane counts them."""
        self.known: dict[tuple[int, Key], list[tuple[list[int], str]]] = {}
        self._behind: dict[int, Key] = {}
        """By channel, what comes behind the next tensors."""
        self._coming: dict[int, deque[list[tuple[dist.Work, Tensor]]]] = {}
        """By channel, receives that are posted: Gloo sends at once to who has posted one, and otherwise asks first."""

    def send(self, tensors: tuple[Tensor, ...], to: int, key: Key) -> None:
        """Sends a header the first time that a key is used on the channel, then the tensors."""
        if (to, key) not in self.sent:
            header = json.dumps([[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in tensors])
            self.sent[to, key] = header
            raw = torch.frombuffer(bytearray(header.encode()), dtype=torch.uint8)
            self._put(torch.tensor([len(raw)]), to)
            self._put(raw, to)
        for tensor in tensors:
            # A complex tensor may say that it is the conjugate of what is in its memory.
            self._put(tensor.detach().resolve_conj().resolve_neg().contiguous(), to)

    def _put(self, tensor: Tensor, to: int) -> None:
        leaving = self._leaving.setdefault(to, deque())
        if len(leaving) == LEAVING:
            leaving.popleft()[0].wait()
        work = dist.isend(tensor, to)
        assert work is not None, "this process is a member of the default group"
        leaving.append((work, tensor))
        self._count(to, 1, tensor.nbytes)

    def flush(self) -> None:
        """Waits for all sends."""
        for leaving in self._leaving.values():
            while leaving:
                leaving.popleft()[0].wait()

    def _count(self, where: object, messages: int, size_bytes: int) -> None:
        before = self._carried.get(where, (0, 0))
        self._carried[where] = before[0] + messages, before[1] + size_bytes

    def traffic(self) -> tuple[int, int]:
        """Returns the messages and bytes that this worker has sent; a member of a sum takes part in a ring."""
        carried = list(self._carried.values())
        return sum(messages for messages, _ in carried), sum(size for _, size in carried)

    def expect(self, source: int, key: Key) -> None:
        """Keeps it for the next receive."""
        self._behind[source] = key

    def receive(self, source: int, key: Key) -> tuple[Tensor, ...]:
        """Receives a header the first time that a key is used on the channel, then the tensors."""
        if (source, key) not in self.known:
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, source)
            raw = torch.zeros(int(size), dtype=torch.uint8)
            dist.recv(raw, source)
            self.known[source, key] = json.loads(bytes(raw.tolist()))
        coming, behind = self._coming.setdefault(source, deque()), self._behind.pop(source, None)
        if not coming:
            coming.append(self._post(source, key))
        if behind is not None and (source, behind) in self.known:
            coming.append(self._post(source, behind))
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
        size = self.groups[group].size()
        self._count(group, 2 * (size - 1), 2 * (size - 1) * tensor.nbytes // size)
        return tensor

    def stop(self) -> None:
        """Peers see this process end."""


@dataclass(frozen=True)
class StagedWire:
    """The wire of a worker on a GPU: everything passes through pinned host memory."""

    wire: Wire
    device: torch.device

    def send(self, tensors: tuple[Tensor, ...], to: int, key: Key) -> None:
        """Copies to the host, then sends."""
        self.wire.send(self._on_host(tensors), to, key)

    def expect(self, source: int, key: Key) -> None:
        """Passes it on."""
        self.wire.expect(source, key)

    def receive(self, source: int, key: Key) -> tuple[Tensor, ...]:
        """Receives, then copies to the device."""
        received: tuple[Tensor, ...] = moved(self.wire.receive(source, key), self.device)
        return received

    def add_up(self, tensor: Tensor, group: str) -> Tensor:
        """Sums on the hosts."""
        (staged,) = self._on_host((tensor,))
        return self.wire.add_up(staged, group).to(tensor.device, non_blocking=True)

    def _on_host(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        staged: tuple[Tensor, ...] = moved(tensors, CPU)
        torch.cuda.current_stream(self.device).synchronize()
        return staged

    def flush(self) -> None:
        """Passes it on."""
        self.wire.flush()

    def stop(self) -> None:
        """Passes it on."""
        self.wire.stop()


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Returns all elements of some tensors in one vector."""
    return torch.cat([t.reshape(-1) for t in tensors]) if tensors else torch.zeros(0)


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Takes a vector apart again."""
    parts = torch.split(vector, [t.numel() for t in like])
    return [part.view_as(t) for part, t in zip(parts, like, strict=True)]
