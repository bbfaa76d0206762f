"""A channel through memory that two processes of one host share: messages from one to the other, first in, first out.

    sender                                         receiver
    waits for a free slot (frame FREE)             waits for the frame MESSAGE
    copies into it, on its stream                  copies out of it, on its stream
    sends the frame MESSAGE                        sends the frame FREE

The sender owns the slots, and adds or enlarges them when it needs to. On a GPU the frames pass between the hosts while
the streams wait for the events of the slots, so no host waits for a device.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from pipedejavu.facts.message_memory import MOST_SLOTS
from pipedejavu.runtime.memory_slot import SLOT, GpuEnds, GpuSlot, HostSlot, MessageSlot
from pipedejavu.runtime.message_layout import MOST_BYTES, MessageLayout
from pipedejavu.runtime.peer_socket import PeerSocket

LAYOUT, MESSAGE, FREE = 1, 3, 4
"""Kinds of frames: the form of a layout follows; the slot and the layout of a message; a slot that is free again."""
NO_SLOT = 0xFFFFFFFF
"""The slot of a message without bytes."""


class SendEnd:
    """The sender's end of a channel."""

    def __init__(self, peer: PeerSocket, ends: GpuEnds | None = None):
        """With `ends`, messages are tensors of a GPU."""
        self.peer, self.ends = peer, ends
        self.device = ends.here if ends else torch.device("cpu")
        self.most = MOST_SLOTS["gpu" if ends else "cpu"]
        self._layouts: dict[MessageLayout, int] = {}
        self._slots: list[MessageSlot] = []
        self._free: deque[int] = deque()
        self._replaced: dict[int, MessageSlot] = {}
        """Slots that were replaced by larger ones; their memory is given back once the receiver has unmapped it."""
        self.messages = self.size_bytes = 0
        """Tensors that were sent, and their bytes."""

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Sends tensors; waits for the receiver only if no slot is free."""
        tensors = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]
        layout = MessageLayout.of(tensors)
        number = self._number(layout)
        self.messages += len(tensors)
        self.size_bytes += sum(t.size_bytes for t in layout.tensors)
        if not layout.size_bytes:
            self.peer.send_frame(MESSAGE, NO_SLOT, number)
            return
        position = self._take_slot(layout.size_bytes)
        slot = self._slots[position]
        slot.start_write()
        for view, tensor in zip(layout.views(slot.raw), tensors, strict=True):
            view.copy_(tensor, non_blocking=True)
        slot.end_write()
        self.peer.send_frame(MESSAGE, position, number)

    def flush(self) -> None:
        """Waits until the receiver has taken all messages."""
        while len(self._free) < len(self._slots):
            self._hear()

    def close(self) -> None:
        """Ends the channel after its last message; the receiver must have closed its end."""
        if self.ends:
            self.peer.wait_for_end()
            for slot in (*self._slots, *self._replaced.values()):
                slot.close()
        self.peer.close()

    def _number(self, layout: MessageLayout) -> int:
        """Returns the number of a layout, which the receiver learns before its first message."""
        number = self._layouts.get(layout)
        if number is None:
            number = self._layouts[layout] = len(self._layouts)
            form = layout.pack()
            self.peer.send_frame(LAYOUT, number, len(form))
            self.peer.send(form)
        return number

    def _take_slot(self, size_bytes: int) -> int:
        """Returns the position of a free slot that is large enough, after making, enlarging or awaiting it."""
        while self.peer.has_input():
            self._hear()
        while not self._free and len(self._slots) == self.most:
            self._hear()
        for position in self._free:
            if self._slots[position].size_bytes >= size_bytes:
                self._free.remove(position)
                return position
        if len(self._slots) < self.most:
            self._slots.append(self._make(size_bytes, len(self._slots)))
            return len(self._slots) - 1
        position = self._free.popleft()
        self._slots[position].settle()
        self._replaced[position] = self._slots[position]
        self._slots[position] = self._make(size_bytes, position)
        return position

    def _make(self, size_bytes: int, position: int) -> MessageSlot:
        if self.ends:
            return GpuSlot.make(size_bytes, position, self.peer, self.ends)
        return HostSlot.make(size_bytes, position, self.peer)

    def _hear(self) -> None:
        """Takes the frame of a slot that is free again."""
        kind, position, size = self.peer.receive_frame()
        if kind != FREE or position >= len(self._slots):
            raise ValueError(f"a peer sent frame {kind} for slot {position}, and {len(self._slots)} slots are known")
        if size:
            self._slots[position].learn_free(self.peer.receive(size))
        if (replaced := self._replaced.pop(position, None)) is not None:
            replaced.close()
        self._free.append(position)


class ReceiveEnd:
    """The receiver's end of a channel."""

    def __init__(self, peer: PeerSocket, ends: GpuEnds | None = None):
        """With `ends`, messages are tensors of a GPU."""
        self.peer, self.ends = peer, ends
        self.device = ends.here if ends else torch.device("cpu")
        self._layouts: dict[int, MessageLayout] = {}
        self._slots: dict[int, MessageSlot] = {}

    def receive(self) -> tuple[Tensor, ...]:
        """Waits for the next message; on a GPU for its frame alone, while the current stream waits for its bytes."""
        while (frame := self.peer.receive_frame())[0] != MESSAGE:
            kind, number, value = frame
            if kind == LAYOUT:
                self._learn_layout(number, value)
            elif kind == SLOT:
                self._learn_slot(number, value)
            else:
                raise ValueError(f"a peer sent a frame of unknown kind {kind}")
        _, position, number = frame
        if number not in self._layouts or (position != NO_SLOT and position not in self._slots):
            raise ValueError(f"a peer sent a message of layout {number} in slot {position}, which it never announced")
        layout = self._layouts[number]
        received = tuple(torch.empty(t.shape, dtype=t.dtype, device=self.device) for t in layout.tensors)
        if position == NO_SLOT:
            return received
        slot = self._slots[position]
        views = layout.views(slot.raw)
        slot.start_read()
        for tensor, view in zip(received, views, strict=True):
            tensor.copy_(view, non_blocking=True)
        handle = slot.end_read()
        self.peer.send_frame(FREE, position, len(handle))
        if handle:
            self.peer.send(handle)
        return received

    def close(self) -> None:
        """Ends the channel: unmaps its memory after the last copy."""
        for slot in self._slots.values():
            slot.settle()
            slot.close()
        self._slots.clear()
        self.peer.close()

    def _learn_layout(self, number: int, size: int) -> None:
        if size > MOST_BYTES:
            raise ValueError(f"a peer announced a layout of {size} bytes; at most {MOST_BYTES} are read")
        self._layouts[number] = MessageLayout.unpack(self.peer.receive(size))

    def _learn_slot(self, position: int, size_bytes: int) -> None:
        if (smaller := self._slots.pop(position, None)) is not None:
            smaller.settle()
            smaller.close()
        self._slots[position] = (
            GpuSlot.take(size_bytes, self.peer, self.ends) if self.ends else HostSlot.take(size_bytes, self.peer)
        )
