"""Sockets between processes of one host: small frames, open files, and notice when the process at the other end ends.

They are Unix sockets in the abstract namespace, which leave nothing on a disk. A process accepts only connections of
the same user that know its secret.
"""

import hmac
import os
import secrets
import socket
import struct
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

MEETING_S = 300.0
"""How long a process waits for the connections of others."""
END_S = 5.0
"""How long a process waits for another to close its end before it gives back the memory that both have mapped."""
FRAME = struct.Struct("<B3xIQ")
"""A frame: its kind, a number and a value, whose meanings the kind determines."""
_HELLO = struct.Struct("<8s32sII")
_MAGIC = b"pdv-mem1"
_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 1024


class LostPeerError(RuntimeError):
    """The process at the other end has ended."""


class Address(NamedTuple):
    """Where a process listens, and what it expects to hear."""

    name: str
    secret: str


class PeerSocket:
    """One end of a connection; each direction is used by one thread at a time."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(None)
        self._connection = connection
        weakref.finalize(self, connection.close)
        self._files: deque[int] = deque()

    def send(self, data: bytes, files: Sequence[int] = ()) -> None:
        """Sends bytes, and duplicates of open files with them; raises LostPeerError if the other process has ended."""
        try:
            sent = socket.send_fds(self._connection, [data], files) if files else 0
            self._connection.sendall(data[sent:])
        except (BrokenPipeError, ConnectionError) as error:
            raise LostPeerError("Connection closed by peer: the process at the other end has ended") from error

    def send_frame(self, kind: int, number: int = 0, value: int = 0, files: Sequence[int] = ()) -> None:
        """Sends a frame, and duplicates of open files with it."""
        self.send(FRAME.pack(kind, number, value), files)

    def receive(self, size: int) -> bytes:
        """Waits for exactly `size` bytes; raises LostPeerError if the other process has ended."""
        parts = list[bytes]()
        while size:
            try:
                part, files, _, _ = socket.recv_fds(self._connection, size, 1, socket.MSG_CMSG_CLOEXEC)
            except ConnectionError as error:
                raise LostPeerError("Connection closed by peer: the process at the other end has ended") from error
            self._files.extend(files)
            if not part:
                raise LostPeerError("Connection closed by peer: the process at the other end has ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def receive_frame(self) -> tuple[int, int, int]:
        """Waits for a frame; returns its kind, number and value."""
        kind, number, value = FRAME.unpack(self.receive(FRAME.size))
        return kind, number, value

    def take_file(self) -> int:
        """Returns the open file that came with the last frame; the caller closes it."""
        if not self._files:
            raise ValueError("a frame announced memory and came without its file")
        return self._files.popleft()

    def has_input(self) -> bool:
        """Whether something has arrived, or the other process has ended."""
        try:
            self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        return True

    def wait_for_end(self) -> None:
        """Waits until the other process closes its end, and drops what it has sent before."""
        self._connection.settimeout(END_S)
        with suppress(OSError):
            while self._connection.recv(4096):
                pass

    def close(self) -> None:
        """Closes this end; the other one reads to the end of what was sent."""
        self._connection.close()


class PeerListener:
    """Accepts the connections that other processes of this host make to this one."""

    def __init__(self) -> None:
        self.address = Address(f"pipedejavu-{secrets.token_hex(16)}", secrets.token_hex(16))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.address.name}")
        self._listener.listen(_BACKLOG)

    def close(self) -> None:
        """Stops listening."""
        self._listener.close()

    def accept(self, awaited: Iterable[tuple[int, int]]) -> dict[tuple[int, int], PeerSocket]:
        """Waits for the awaited connections, each the number of a process and of its connection; then stops listening.

        Raises LostPeerError if one is missing after `MEETING_S`.
        """
        missing, accepted = set(awaited), dict[tuple[int, int], PeerSocket]()
        self._listener.settimeout(MEETING_S)
        try:
            while missing:
                connection, _ = self._listener.accept()
                raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                peer = PeerSocket(connection)
                is_same_user = _CREDENTIALS.unpack(raw)[1] == os.geteuid()
                name = self._greeting(peer) if is_same_user else None
                if name is not None and name in missing:
                    missing.remove(name)
                    accepted[name] = peer
                else:
                    peer.close()
        except TimeoutError as error:
            rank = min(missing)[0]
            raise LostPeerError(f"Connection timed out: rank {rank} did not connect in {MEETING_S:.0f} s") from error
        finally:
            self._listener.close()
        return accepted

    def _greeting(self, peer: PeerSocket) -> tuple[int, int] | None:
        """Returns who connects; None for a process that does not know the secret."""
        try:
            magic, secret, rank, number = _HELLO.unpack(peer.receive(_HELLO.size))
        except LostPeerError:
            return None
        is_known = magic == _MAGIC and hmac.compare_digest(secret, self.address.secret.encode())
        return (rank, number) if is_known else None


def connect_peer(address: Address, rank: int, number: int) -> PeerSocket:
    """Connects to a process that listens; `rank` and `number` tell it which of the connections it awaits this is."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"\0{address.name}")
    except OSError as error:
        connection.close()
        raise LostPeerError(f"Connection refused: the process at '{address.name}' has ended ({error})") from error
    peer = PeerSocket(connection)
    peer.send(_HELLO.pack(_MAGIC, address.secret.encode(), rank, number))
    return peer


def connect_all(
    rank: int, listener: PeerListener, addresses: Mapping[int, Address], pairs: Sequence[tuple[int, int]]
) -> dict[int, PeerSocket]:
    """Returns this rank's end of each of the pairs of ranks that it is part of, by the position of the pair.

    All ranks call it with the same pairs. The second of a pair connects to the first.
    """
    made = {
        number: connect_peer(addresses[first], rank, number)
        for number, (first, second) in enumerate(pairs)
        if second == rank
    }
    awaited = {(second, number) for number, (first, second) in enumerate(pairs) if first == rank}
    return made | {number: peer for (_, number), peer in listener.accept(awaited).items()}
