"""Slots: memory that two processes of one host share; one copies a message into it and the other copies it out.

A slot of host memory is filled when its frame arrives. A slot of a GPU has two events: the sender records `ready` after
its copy, and the receiver records `free` after its own. Streams wait for them, not hosts.
"""

import os
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from pipedejavu.facts import MemoryFile, format_bytes
from pipedejavu.facts.message_memory import paged
from pipedejavu.runtime.cuda_ipc import (
    HANDLE_BYTES,
    ExportedMemory,
    MappedMemory,
    make_shared_event,
    open_shared_event,
)
from pipedejavu.runtime.peer_socket import PeerSocket

SLOT = 2
"""The kind of frame that announces a slot: its number and its size."""


class MessageSlot(Protocol):
    """One end of a slot."""

    raw: Tensor
    """The bytes of the slot."""
    size_bytes: int

    def start_write(self) -> None:
        """Makes the current stream wait until the slot is free."""

    def end_write(self) -> None:
        """Marks what the current stream has written as ready."""

    def start_read(self) -> None:
        """Makes the current stream wait until the slot is ready."""

    def end_read(self) -> bytes:
        """Marks the slot as free after what the current stream reads; returns an event's handle the first time."""

    def learn_free(self, handle: bytes) -> None:
        """Opens the event by which the receiver marks the slot as free."""

    def settle(self) -> None:
        """Waits on the host until this end's last copy has ended."""

    def close(self) -> None:
        """Gives the memory back."""


class HostSlot:
    """One end of a slot in host memory."""

    def __init__(self, raw: Tensor):
        self.raw, self.size_bytes = raw, raw.numel()

    @classmethod
    def make(cls, size_bytes: int, number: int, peer: PeerSocket) -> Self:
        """Allocates a slot and announces it."""
        size_bytes = paged(size_bytes)
        file = allocate(size_bytes)
        try:
            peer.send_frame(SLOT, number, size_bytes, (file.file,))
            return cls(map_file(file.file, size_bytes))
        finally:
            file.close()

    @classmethod
    def take(cls, size_bytes: int, peer: PeerSocket) -> Self:
        """Opens the slot that a frame has announced."""
        return cls(take_file(size_bytes, peer))

    def start_write(self) -> None:
        """Does nothing: the frame that gave the slot back was sent after the receiver's copy."""

    def end_write(self) -> None:
        """Does nothing: the copy has ended."""

    def start_read(self) -> None:
        """Does nothing: the message was sent after the sender's copy."""

    def end_read(self) -> bytes:
        """Returns no handle."""
        return b""

    def learn_free(self, handle: bytes) -> None:
        """Does nothing."""

    def settle(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing: the memory goes with its last mapping."""


class GpuEnds(NamedTuple):
    """The GPUs of both ends of a channel, as this process numbers them."""

    here: torch.device
    there: torch.device


class GpuSlot:
    """One end of a slot in the memory of a GPU; the sender's end owns the memory."""

    def __init__(self, memory: ExportedMemory | MappedMemory, ends: GpuEnds, ready: torch.cuda.Event):
        self.memory, self.ends, self.ready = memory, ends, ready
        self.raw, self.size_bytes = memory.raw, memory.size_bytes
        self.free: torch.cuda.Event | None = None
        self._handle = b""

    @classmethod
    def make(cls, size_bytes: int, number: int, peer: PeerSocket, ends: GpuEnds) -> Self:
        """Allocates a slot on the sender's GPU and announces it."""
        memory = ExportedMemory(size_bytes, ends.here)
        ready, handle = make_shared_event(ends.here)
        peer.send_frame(SLOT, number, memory.size_bytes)
        peer.send(memory.handle + handle)
        return cls(memory, ends, ready)

    @classmethod
    def take(cls, size_bytes: int, peer: PeerSocket, ends: GpuEnds) -> Self:
        """Opens the slot that a frame has announced, which is on the sender's GPU."""
        memory_handle, ready_handle = peer.receive(HANDLE_BYTES), peer.receive(HANDLE_BYTES)
        memory = MappedMemory(memory_handle, size_bytes, ends.there)
        slot = cls(memory, ends, open_shared_event(ready_handle, ends.there))
        slot.free, slot._handle = make_shared_event(ends.here)
        return slot

    @property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.ends.here)

    def start_write(self) -> None:
        """Makes the current stream wait until the receiver has copied the last message."""
        if self.free is not None:
            self._stream.wait_event(self.free)

    def end_write(self) -> None:
        """Records that the message is in the slot."""
        self.ready.record(self._stream)

    def start_read(self) -> None:
        """Makes the current stream wait until the message is in the slot."""
        self._stream.wait_event(self.ready)

    def end_read(self) -> bytes:
        """Records that the message was copied; returns the event's handle the first time."""
        assert self.free is not None
        self.free.record(self._stream)
        handle, self._handle = self._handle, b""
        return handle

    def learn_free(self, handle: bytes) -> None:
        """Opens the receiver's event, which is on its GPU."""
        self.free = open_shared_event(handle, self.ends.there)

    def settle(self) -> None:
        """Waits on the host until this end's last copy has ended."""
        last = self.ready if isinstance(self.memory, ExportedMemory) else self.free
        assert last is not None
        last.synchronize()

    def close(self) -> None:
        """Frees the sender's memory, or unmaps it from the receiver."""
        self.memory.close()


def allocate(size_bytes: int) -> MemoryFile:
    """Returns a new memory file; raises MemoryError if the host has too little memory."""
    try:
        return MemoryFile("pipedejavu-slot", size_bytes)
    except OSError as error:
        raise MemoryError(
            f"the host has no {format_bytes(size_bytes)} of memory left for the messages of this worker ({error});"
            " use smaller microbatches"
        ) from error


def map_file(file: int, size_bytes: int) -> Tensor:
    """Returns an open file's memory as bytes; raises ValueError if the file is too small."""
    held = os.fstat(file).st_size
    if held < size_bytes:
        raise ValueError(f"a peer announced {size_bytes} bytes of shared memory and its file holds {held}")
    # Unlike Python's mmap, torch keeps no duplicate of the file open.
    return torch.from_file(f"/proc/self/fd/{file}", shared=True, size=size_bytes, dtype=torch.uint8)


def take_file(size_bytes: int, peer: PeerSocket) -> Tensor:
    """Returns the memory whose file came with the last frame, and closes the file."""
    file = peer.take_file()
    try:
        return map_file(file, size_bytes)
    finally:
        os.close(file)
