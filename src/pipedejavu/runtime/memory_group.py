"""Collectives of processes of one host through memory that they share.

Every member has two regions that all others map; successive parts of a tensor use them in turn. A sum that all members
get takes two meetings:

    1. each member copies its part into its region             then all meet
    2. each adds one share of all parts, in the order of the members, into its own region      then all meet
    3. each copies the shares of the others from their regions

The other collectives end with what each member reads after the first meeting. A member writes to a region again only
two parts later, and by then all have met again, so they have read it. To meet, each member sends a frame to all others
and waits for theirs; on a GPU each records an event before that and its stream waits for the events of the others, so
no host waits for a device. Sums have the same bits on all members.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pipedejavu.facts.message_memory import PART_BYTES, paged
from pipedejavu.runtime.cuda_ipc import (
    HANDLE_BYTES,
    ExportedMemory,
    MappedMemory,
    make_shared_event,
    open_shared_event,
)
from pipedejavu.runtime.memory_slot import GpuEnds, allocate, map_file, take_file
from pipedejavu.runtime.peer_socket import PeerSocket
from pipedejavu.runtime.traffic import Counts, Traffic

REGION, MEET, CLOSED = 16, 17, 18
"""Kinds of frames: a region of a member, its arrival at a meeting, and that it has unmapped old regions."""
_WIDENED = (torch.bfloat16, torch.float16)
"""Dtypes that are added in float32 and rounded once, as torch's own sums do."""

Peers = Mapping[int, PeerSocket]
"""The connection to each other member."""


class Regions(Protocol):
    """The two regions of each member, and how members meet."""

    size_bytes: int

    def raw(self, which: int) -> Mapping[int, Tensor]:
        """Returns the bytes of each member's region, by member."""

    def arrive(self, which: int, phase: int) -> None:
        """Marks what the current stream has done so far."""

    def follow(self, member: int, which: int, phase: int) -> None:
        """Makes the current stream wait for what another member has marked."""

    def close(self) -> None:
        """Unmaps the regions of the others, when all members have stopped using them, and gives back its own."""


class HostRegions:
    """Regions in host memory."""

    def __init__(self, size_bytes: int, member: int, peers: Peers):
        self.size_bytes = paged(size_bytes)
        file = allocate(2 * self.size_bytes)
        try:
            for peer in peers.values():
                peer.send_frame(REGION, 0, 2 * self.size_bytes, (file.file,))
            whole = {member: map_file(file.file, 2 * self.size_bytes)}
        finally:
            file.close()
        for other, peer in peers.items():
            whole[other] = take_file(_expect(peer, REGION)[1], peer)
        self._halves = [{m: raw[n * self.size_bytes :][: self.size_bytes] for m, raw in whole.items()} for n in (0, 1)]

    def raw(self, which: int) -> Mapping[int, Tensor]:
        """Returns the bytes of each member's region, by member."""
        return self._halves[which]

    def arrive(self, which: int, phase: int) -> None:
        """Does nothing: what was copied is there."""

    def follow(self, member: int, which: int, phase: int) -> None:
        """Does nothing: the member's frame came after its copies."""

    def close(self) -> None:
        """Does nothing: the memory goes with its last mapping."""


class GpuRegions:
    """Regions on the GPUs of the members."""

    def __init__(self, size_bytes: int, member: int, peers: Peers, ends: Mapping[int, GpuEnds]):
        self.here, self.peers = next(iter(ends.values())).here, peers
        self._own = ExportedMemory(2 * size_bytes, self.here)
        self.size_bytes = self._own.size_bytes // 2
        marks = [make_shared_event(self.here) for _ in range(4)]
        form = self._own.handle + b"".join(handle for _, handle in marks)
        for peer in peers.values():
            peer.send_frame(REGION, 0, self._own.size_bytes)
            peer.send(form)
        self._events = {member: [event for event, _ in marks]}
        self._mapped = dict[int, MappedMemory]()
        for other, peer in peers.items():
            size, there = _expect(peer, REGION)[1], ends[other].there
            self._mapped[other] = MappedMemory(peer.receive(HANDLE_BYTES), size, there)
            self._events[other] = [open_shared_event(peer.receive(HANDLE_BYTES), there) for _ in range(4)]
        whole = {member: self._own.raw} | {other: memory.raw for other, memory in self._mapped.items()}
        self._halves = [{m: raw[n * self.size_bytes :][: self.size_bytes] for m, raw in whole.items()} for n in (0, 1)]
        self.member = member

    def raw(self, which: int) -> Mapping[int, Tensor]:
        """Returns the bytes of each member's region, by member."""
        return self._halves[which]

    def arrive(self, which: int, phase: int) -> None:
        """Records the event of a meeting."""
        self._events[self.member][2 * which + phase].record(torch.cuda.current_stream(self.here))

    def follow(self, member: int, which: int, phase: int) -> None:
        """Makes the current stream wait for the event of another member."""
        torch.cuda.current_stream(self.here).wait_event(self._events[member][2 * which + phase])

    def close(self) -> None:
        """Unmaps the regions of the others; frees its own once all others have unmapped it."""
        torch.cuda.synchronize(self.here)
        for memory in self._mapped.values():
            memory.close()
        for peer in self.peers.values():
            peer.send_frame(CLOSED)
        for peer in self.peers.values():
            _expect(peer, CLOSED)
        self._own.close()


class MemoryGroup:
    """One member's part in the collectives of a group; all members make the same calls in the same order."""

    def __init__(self, member: int, peers: Peers, ends: Mapping[int, GpuEnds] | None = None):
        """With `ends`, by other member, tensors of a GPU are added there; tensors of the host always on the host."""
        self.member, self.peers, self.ends = member, dict(sorted(peers.items())), ends
        self.members = sorted((member, *peers))
        self.position = self.members.index(member)
        self._regions: dict[str, Regions] = {}
        self._which = self._meetings = 0
        self.traffic = Traffic()

    def add_up(self, vector: Tensor) -> Tensor:
        """Returns the sum of the members' vectors, which have one shape and dtype; it takes the place of the vector."""
        flat = _contiguous(vector).view(-1)
        self.traffic.add_up("", len(self.members), flat)
        if flat.numel():
            regions = self._fitting(flat.nbytes, flat.device)
            for part in torch.split(flat, regions.size_bytes // flat.itemsize):
                self._add_part(part, regions)
        return flat.view(vector.shape)

    def reduce_scatter(self, vector: Tensor) -> Tensor:
        """Returns this member's run of rows of the sum of the members' tensors, which have one shape and dtype."""
        size = len(self.members)
        runs = _contiguous(vector).view(size, -1)
        total = runs.new_empty(runs.shape[1])
        self.traffic.reduce_scatter("", size, runs)
        if runs.numel():
            regions = self._fitting(runs.nbytes, runs.device)
            width = regions.size_bytes // runs.itemsize // size
            for part, place in zip(torch.split(runs, width, dim=1), torch.split(total, width), strict=True):
                held = self._held(regions, part.dtype, part.shape)
                for n in self._others:
                    held[self.position][n].copy_(part[n], non_blocking=True)
                self._meet(regions, 0)
                held[self.position] = part
                sum_in_order([rows[self.position] for rows in held], place)
        return total.view(len(vector) // size, *vector.shape[1:])

    def all_gather(self, run: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns the rows of all members, which have one shape and dtype, one member after the other.

        They are in `out` if it is given, in which the member's own rows may be in their place already.
        """
        size, flat = len(self.members), _contiguous(run).view(-1)
        runs = flat.new_empty(size, flat.numel()) if out is None else out.view(size, flat.numel())
        self.traffic.all_gather("", size, flat)
        if flat.numel():
            regions = self._fitting(flat.nbytes, flat.device)
            width = regions.size_bytes // flat.itemsize
            for part, places in zip(torch.split(flat, width), torch.split(runs, width, dim=1), strict=True):
                held = self._held(regions, part.dtype, part.shape)
                held[self.position].copy_(part, non_blocking=True)
                self._meet(regions, 0)
                held[self.position] = part
                for place, rows in zip(places, held, strict=True):
                    if place.data_ptr() != rows.data_ptr():
                        place.copy_(rows, non_blocking=True)
        return runs.view(size * len(run), *run.shape[1:])

    def all_to_all(self, rows: Tensor, counts: Counts) -> Tensor:
        """Sends rows to each member; returns the rows that the members sent to this one, in their order.

        `counts[i][j]` is the number of rows from the i-th member to the j-th; all members have the same table.
        """
        size, row = len(self.members), math.prod(rows.shape[1:])
        self.traffic.all_to_all("", self.position, rows, counts)
        sent = [part.reshape(-1) for part in torch.split(_contiguous(rows), counts[self.position])]
        received = [rows.new_empty(counts[n][self.position] * row) for n in range(size)]
        received[self.position].copy_(sent[self.position], non_blocking=True)
        longest = row * max(max(one) for one in counts)
        if longest:
            regions = self._fitting(size * longest * rows.itemsize, rows.device)
            width = regions.size_bytes // rows.itemsize // size
            for start in range(0, longest, width):
                held = self._held(regions, rows.dtype, (size, width))
                for n in self._others:
                    part = sent[n][start : start + width]
                    held[self.position][n][: len(part)].copy_(part, non_blocking=True)
                self._meet(regions, 0)
                for n in self._others:
                    place = received[n][start : start + width]
                    place.copy_(held[n][self.position][: len(place)], non_blocking=True)
        return torch.cat(received).view(-1, *rows.shape[1:])

    def close(self) -> None:
        """Ends the group; all members call it together, after their last sum."""
        for regions in self._regions.values():
            regions.close()
        self._regions.clear()
        for peer in self.peers.values():
            peer.close()

    @property
    def _others(self) -> list[int]:
        """The positions of all other members."""
        return [n for n in range(len(self.members)) if n != self.position]

    def _held(self, regions: Regions, dtype: torch.dtype, shape: Sequence[int]) -> list[Tensor]:
        """Returns the start of each member's next region as a tensor."""
        self._which = 1 - self._which
        size_bytes, raw = math.prod(shape) * dtype.itemsize, regions.raw(self._which)
        return [raw[member][:size_bytes].view(dtype).view(*shape) for member in self.members]

    def _fitting(self, size_bytes: int, device: torch.device) -> Regions:
        """Returns regions on a device; replaces them, on all members at once, if they are too small."""
        needed, kind = min(size_bytes, PART_BYTES), device.type
        regions = self._regions.get(kind)
        if regions is None or regions.size_bytes < needed:
            if regions is not None:
                regions.close()
            if kind == "cuda":
                assert self.ends is not None, "the members of this group have no GPU"
                regions = GpuRegions(needed, self.member, self.peers, self.ends)
            else:
                regions = HostRegions(needed, self.member, self.peers)
            self._regions[kind] = regions
        return regions

    def _add_part(self, part: Tensor, regions: Regions) -> None:
        held = self._held(regions, part.dtype, part.shape)
        held[self.position].copy_(part, non_blocking=True)
        self._meet(regions, 0)
        size = len(self.members)
        shares = [slice(part.numel() * n // size, part.numel() * (n + 1) // size) for n in range(size)]
        mine = shares[self.position]
        held[self.position][mine].copy_(sum_in_order([rows[mine] for rows in held]), non_blocking=True)
        self._meet(regions, 1)
        for share, rows in zip(shares, held, strict=True):
            part[share].copy_(rows[share], non_blocking=True)

    def _meet(self, regions: Regions, phase: int) -> None:
        """Waits for all members; on a GPU, the stream waits for their streams."""
        regions.arrive(self._which, phase)
        self._meetings += 1
        for peer in self.peers.values():
            peer.send_frame(MEET, phase, self._meetings)
        for member, peer in self.peers.items():
            if (meeting := _expect(peer, MEET)) != (phase, self._meetings):
                raise ValueError(f"rank {member} is at meeting {meeting[1]} of a group, and this is {self._meetings}")
            regions.follow(member, self._which, phase)


def sum_in_order(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Returns the sum of tensors, added one after the other; those of 16 bits are added in float32 and rounded once."""
    first, *others = parts
    is_wide = first.dtype not in _WIDENED
    total = torch.empty_like(first) if out is None else out
    added = total if is_wide else first.float()
    for n, part in enumerate(others):
        torch.add(added if n or not is_wide else first, part, out=added)
    if not others:
        added = first
    return total if added is total else total.copy_(added)


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _expect(peer: PeerSocket, kind: int) -> tuple[int, int]:
    """Waits for a frame of a kind; returns its number and value."""
    frame = peer.receive_frame()
    if frame[0] != kind:
        raise ValueError(f"a member of a group sent frame {frame[0]} where {kind} was due: its calls differ")
    return frame[1:]
