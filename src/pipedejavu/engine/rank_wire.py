"""The wire of a rank: each edge and each group takes the fastest wire that both ends have.

All ranks tell each other what they are, choose alike, and connect before the first round.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations

from torch import Tensor

from pipedejavu.engine.device import CPU, device_of
from pipedejavu.engine.nccl_wire import NcclWire
from pipedejavu.engine.staged_wire import on_host, staged
from pipedejavu.engine.summation_service import SummationService
from pipedejavu.engine.wire import Key, PeerLeftError, ProcessWire, Wire
from pipedejavu.engine.wire_choice import WireKind, choose_group_wire, choose_wire
from pipedejavu.engine.wire_end import describe_end, gather_ends, open_listener
from pipedejavu.program import ActionKind, GroupRole, Program
from pipedejavu.runtime.cuda_ipc import find_device
from pipedejavu.runtime.memory_channel import ReceiveEnd, SendEnd
from pipedejavu.runtime.memory_group import MemoryGroup
from pipedejavu.runtime.memory_slot import GpuEnds
from pipedejavu.runtime.peer_socket import Address, LostPeerError, PeerListener, PeerSocket, connect_all
from pipedejavu.runtime.traffic import Counts, even_counts

Edge = tuple[int, int]
"""Sender and receiver."""


class RankWire:
    """One rank's end of all channels and groups."""

    def __init__(self, program: Program, rank: int):
        """Connects this rank to the others; all ranks call it together."""
        self.rank, self.device = rank, device_of(program, rank)
        self.outlives_peers = False
        """Whether this rank goes on if a process at the other end of a channel dies."""
        self._lost: set[int] = set()
        """Ranks that have died and that this one outlives."""
        listener = open_listener()
        self.ends = gather_ends(describe_end(self.device, listener))
        members = _members(program)
        self.host_groups = _host_groups(program, [end.host for end in self.ends])
        """By group that has helpers, the trainers of each host, if several hosts have some."""
        members |= _members_on_hosts(self.host_groups)
        self.edges = {edge: choose_wire(*(self.ends[r] for r in edge)) for edge in sorted(_edges(program))}
        self.groups = {name: choose_group_wire([self.ends[r] for r in ranks]) for name, ranks in members.items()}
        self.num_members = {name: len(ranks) for name, ranks in members.items()}
        self._norms = {name for name, group in program.groups.items() if group.role is GroupRole.NORM}
        # NCCL sums tensors of GPUs only, so those of the host take Gloo.
        on_gloo = {n: r for n, r in members.items() if not self.groups[n].kind.is_in_memory}
        self.gloo = ProcessWire(rank, on_gloo)
        self._make_services(program)
        self._staged = staged(self.gloo, self.device)
        self.nccl = self._make_nccl(members)
        self.senders: dict[int, SendEnd] = {}
        self.receivers: dict[int, ReceiveEnd] = {}
        self.memory_groups: dict[str, MemoryGroup] = {}
        if listener is not None:
            self._connect(listener, members)

    def _connect(self, listener: PeerListener, members: dict[str, tuple[int, ...]]) -> None:
        """Opens the channels and groups whose ranks share memory."""
        pairs = [edge for edge, choice in self.edges.items() if choice.kind.is_in_memory]
        shared = [(n, pair) for n, r in members.items() if self.groups[n].kind.is_in_memory for pair in _pairs(r)]
        addresses = {n: Address(end.name, end.secret) for n, end in enumerate(self.ends)}
        sockets = connect_all(self.rank, listener, addresses, [*pairs, *(pair for _, pair in shared)])
        self._open_channels(pairs, sockets)
        self._open_groups(shared, {n - len(pairs): peer for n, peer in sockets.items() if n >= len(pairs)})

    def _make_services(self, program: Program) -> None:
        """Makes the summation service of each group with helpers, of which the first trainer of each host is a part."""
        for name, hosts in sorted(self.host_groups.items()):
            trainers, helpers = [ranks[0] for ranks in hosts], program.groups[name].helpers
            self.gloo.services[name] = SummationService(name, trainers, helpers, self.rank, self.gloo.carried)

    def _make_nccl(self, members: dict[str, tuple[int, ...]]) -> NcclWire:
        edges = [edge for edge, choice in self.edges.items() if choice.kind == WireKind.NCCL]
        groups = {
            n: r for n, r in members.items() if self.groups[n].kind == WireKind.NCCL and n not in self._norms
        }  # fmt: skip
        return NcclWire(self.rank, self.device, edges, groups)

    def _open_channels(self, edges: list[Edge], sockets: dict[int, PeerSocket]) -> None:
        for number, (source, target) in enumerate(edges):
            if self.rank not in (source, target):
                continue
            other = target if source == self.rank else source
            ends = self._gpu_ends(other) if self.edges[source, target].kind == WireKind.CUDA_IPC else None
            if source == self.rank:
                self.senders[target] = SendEnd(sockets[number], ends)
            else:
                self.receivers[source] = ReceiveEnd(sockets[number], ends)

    def _open_groups(self, shared: list[tuple[str, Edge]], sockets: dict[int, PeerSocket]) -> None:
        peers: dict[str, dict[int, PeerSocket]] = {}
        for number, (name, (one, other)) in enumerate(shared):
            if self.rank in (one, other):
                peers.setdefault(name, {})[one + other - self.rank] = sockets[number]
        for name, connected in peers.items():
            is_on_gpu = self.groups[name].kind == WireKind.CUDA_IPC
            ends = {other: self._gpu_ends(other) for other in connected} if is_on_gpu else None
            self.memory_groups[name] = MemoryGroup(self.rank, connected, ends)

    def _gpu_ends(self, other: int) -> GpuEnds:
        there = find_device(self.ends[other].gpu)
        assert there is not None, "the choice of this wire requires that the GPU is visible"
        return GpuEnds(self.device, there)

    def is_issued(self, lane: str) -> bool:
        """Whether what this lane transfers is issued to its stream, so that the lane's thread need not wait for it."""
        name = lane.removeprefix("net")
        if name.startswith("*"):
            by_host = self._norms | self.host_groups.keys()
            return name[1:] in self.groups and name[1:] not in by_host and self.groups[name[1:]].kind.is_on_gpu
        edge = (self.rank, int(name[1:])) if name.startswith(">") else (int(name[1:]), self.rank)
        return edge in self.edges and self.edges[edge].kind.is_on_gpu

    def send(self, tensors: tuple[Tensor, ...], to: int, key: Key) -> None:
        """Sends tensors to a rank without waiting for it to receive them, unless several messages are unreceived."""
        kind = self._kind(self.rank, to)
        if kind.is_in_memory:
            is_staged = kind == WireKind.SHARED_MEMORY and self.device != CPU
            with self._outliving(to):
                self.senders[to].send(on_host(tensors, self.device) if is_staged else tensors)
        elif kind == WireKind.NCCL:
            self.nccl.send(tensors, to, key)
        else:
            self._staged.send(tensors, to, key)

    def expect(self, source: int, key: Key) -> None:
        """Announces the key after the next one from a rank; only Gloo posts receives early."""
        if self._kind(source, self.rank) == WireKind.GLOO:
            self._staged.expect(source, key)

    def receive(self, source: int, key: Key) -> tuple[Tensor, ...]:
        """Returns the next tensors from a rank, on this rank's device.

        Raises PeerLeftError if its process has died and this rank outlives it.
        """
        kind = self._kind(source, self.rank)
        if kind.is_in_memory:
            received = self._receive_in_memory(source)
            is_staged = kind == WireKind.SHARED_MEMORY and self.device != CPU
            return tuple(t.to(self.device, non_blocking=True) for t in received) if is_staged else received
        return self.nccl.receive(source, key) if kind == WireKind.NCCL else self._staged.receive(source, key)

    def add_up(self, tensor: Tensor, group: str) -> Tensor:
        """Returns the sum of the members' tensors, with the same bits on all of them."""
        return self._collect(tensor, group, lambda memory, t: memory.add_up(t), lambda wire, t: wire.add_up(t, group))

    def push_pull(self, vector: Tensor, group: str) -> Tensor:
        """Returns the sum of the members' vectors: over each host first, then over the hosts and the helpers."""
        ranks = next(ranks for ranks in self.host_groups[group] if self.rank in ranks)
        if len(ranks) == 1:
            return self._staged.push_pull(vector, group)
        local, count = _on_host(group, ranks), vector.numel()
        vector = self.add_up(vector, local)
        is_first = self.rank == ranks[0]
        total = self._staged.push_pull(vector, group) if is_first else vector
        counts = [[count] * len(ranks), *([0] * len(ranks) for _ in ranks[1:])]
        sent = total.repeat(len(ranks)) if is_first else vector[:0]
        return self.all_to_all(sent, local, counts)

    def serve(self, group: str) -> None:
        """Sums a part of what the hosts of a group push."""
        self._staged.serve(group)

    def reduce_scatter(self, vector: Tensor, group: str) -> Tensor:
        """Returns this rank's run of rows of the sum of the members' tensors."""
        return self._collect(
            vector,
            group,
            lambda memory, tensor: memory.reduce_scatter(tensor),
            lambda wire, tensor: wire.reduce_scatter(tensor, group),
        )

    def all_gather(self, run: Tensor, group: str, out: Tensor | None = None) -> Tensor:
        """Returns the rows of all members, who have equally many, one member after the other; in `out` if given."""
        place = out if group in self.groups and not self._is_staged(run, group) else None
        whole = self._collect(
            run,
            group,
            lambda memory, tensor: memory.all_gather(tensor, place),
            lambda wire, tensor: wire.all_gather(tensor, group, place),
        )
        return whole if out is None or place is not None else out.copy_(whole, non_blocking=True)

    def all_to_all(self, rows: Tensor, group: str, counts: Counts | None = None) -> Tensor:
        """Sends rows to each member; returns the rows that the members sent to this one, in their order."""
        if group not in self.groups:
            return rows
        table = counts or even_counts(self.num_members[group], len(rows))
        return self._collect(
            rows,
            group,
            lambda memory, tensor: memory.all_to_all(tensor, table),
            lambda wire, tensor: wire.all_to_all(tensor, group, table),
        )

    def _collect(
        self,
        tensor: Tensor,
        group: str,
        in_memory: Callable[[MemoryGroup, Tensor], Tensor],
        by_torch: Callable[[Wire | NcclWire, Tensor], Tensor],
    ) -> Tensor:
        """Returns the result of a collective on this tensor's device, by the wire of the group."""
        if group not in self.groups:  # this rank is the only member
            return tensor
        kind = self.groups[group].kind
        if self._is_staged(tensor, group):
            (on_cpu,) = on_host((tensor,), self.device)
            return in_memory(self.memory_groups[group], on_cpu).to(self.device, non_blocking=True)
        if kind.is_in_memory:
            return in_memory(self.memory_groups[group], tensor)
        return by_torch(self.nccl if tensor.is_cuda and kind == WireKind.NCCL else self._staged, tensor)

    def _is_staged(self, tensor: Tensor, group: str) -> bool:
        """Whether a tensor of a GPU passes through memory that the processes of its host share."""
        return tensor.is_cuda and self.groups[group].kind == WireKind.SHARED_MEMORY

    def _kind(self, source: int, target: int) -> WireKind:
        """Returns the wire of an edge; exchanges between rounds may take edges that the program has not."""
        choice = self.edges.get((source, target))
        return choice.kind if choice else WireKind.GLOO

    def flush(self) -> None:
        """Waits until all sends are complete."""
        for to, sender in self.senders.items():
            with self._outliving(to):
                sender.flush()
        self._staged.flush()

        for lost in self._lost & self.senders.keys():
            self.senders.pop(lost).close()
        for lost in self._lost & self.receivers.keys():
            self.receivers.pop(lost).close()

    def _receive_in_memory(self, source: int) -> tuple[Tensor, ...]:
        with self._outliving(source):
            if source not in self._lost or source in self.receivers:
                return self.receivers[source].receive()
        raise PeerLeftError

    @contextmanager
    def _outliving(self, peer: int) -> Iterator[None]:
        """Goes on if a process at the other end has died and this rank outlives it; notes that it is lost."""
        try:
            yield
        except LostPeerError:
            if not self.outlives_peers:
                raise
            self._lost.add(peer)

    def stop(self) -> None:
        """Does nothing: peers notice that this process ends."""

    def close(self) -> None:
        """Gives back the memory of all channels and groups; all ranks call it together, after their last round."""
        for receiver in self.receivers.values():
            receiver.close()
        for sender in self.senders.values():
            sender.close()
        for group in self.memory_groups.values():
            group.close()
        self.receivers, self.senders, self.memory_groups = {}, {}, {}

    def traffic(self) -> tuple[int, int]:
        """Returns the messages and bytes that this rank has sent; a sum counts as a ring all-reduce."""
        sent = [(sender.messages, sender.size_bytes) for sender in self.senders.values()]
        summed = [group.traffic.total() for group in self.memory_groups.values()]
        parts = [*sent, *summed, self.gloo.traffic(), self.nccl.traffic()]
        return sum(messages for messages, _ in parts), sum(size for _, size in parts)

    def describe(self) -> str:
        """Returns the wires of all edges and groups, each with its reason; empty if there are none."""
        chosen = [*self.edges.values(), *self.groups.values()]
        return "; ".join(f"{choice.kind} ({choice.reason})" for choice in dict.fromkeys(chosen))


def _members(program: Program) -> dict[str, tuple[int, ...]]:
    """Returns the ranks of each group that has several."""
    return {name: group.workers for name, group in sorted(program.groups.items()) if len(group.workers) > 1}


def _host_groups(program: Program, hosts: Sequence[str]) -> dict[str, list[tuple[int, ...]]]:
    """Returns, for each group with helpers, its workers by host; each by itself if all are on one host."""
    divided = {}
    for name, group in program.groups.items():
        if not group.helpers or len(group.workers) == 1:
            continue
        by_host: dict[object, tuple[int, ...]] = {}
        is_alone = len({hosts[rank] for rank in group.workers}) == 1
        for rank in sorted(group.workers):
            key = rank if is_alone else hosts[rank]
            by_host[key] = (*by_host.get(key, ()), rank)
        divided[name] = [*by_host.values()]
    return divided


def _members_on_hosts(host_groups: dict[str, list[tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """Returns the groups of the trainers that share a host."""
    return {_on_host(n, ranks): ranks for n, hosts in host_groups.items() for ranks in hosts if len(ranks) > 1}


def _on_host(group: str, ranks: tuple[int, ...]) -> str:
    """Returns the name of the group of the workers of one host."""
    return f"{group}+host{ranks[0]}"


def _edges(program: Program) -> Iterable[Edge]:
    """Returns the edges on which the actions of a program send."""
    return {
        (worker, a.peer)
        for worker, sequence in enumerate(program.workers)
        for a in sequence.actions
        if a.kind == ActionKind.SEND
    }


def _pairs(ranks: tuple[int, ...]) -> list[Edge]:
    return list(combinations(sorted(ranks), 2))
