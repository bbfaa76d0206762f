"""Connections between processes of one host: who is let in, and what happens if one is missing."""

import socket
import threading

import pytest

from pipedejavu.runtime import peer_socket
from pipedejavu.runtime.peer_socket import Address, LostPeerError, PeerListener, PeerSocket, connect_all, connect_peer


def test_only_who_knows_the_secret_and_is_awaited_is_accepted():
    listener = PeerListener()
    stranger = connect_peer(Address(listener.address.name, "0" * 32), 1, 0)
    unexpected = connect_peer(listener.address, 2, 0)
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(f"\0{listener.address.name}")
    silent.close()
    known = connect_peer(listener.address, 1, 0)
    again = connect_peer(listener.address, 1, 1)
    accepted = listener.accept([(1, 0), (1, 1)])
    assert accepted.keys() == {(1, 0), (1, 1)}
    for refused in (stranger, unexpected):
        with pytest.raises(LostPeerError, match="Connection closed by peer"):
            refused.receive(1)
    known.send_frame(7, 1, 2)
    assert accepted[1, 0].receive_frame() == (7, 1, 2)
    accepted[1, 1].send(b"abc")
    assert again.receive(3) == b"abc"


def test_another_user_is_refused(monkeypatch):
    listener = PeerListener()
    peer = connect_peer(listener.address, 1, 0)
    monkeypatch.setattr(peer_socket.os, "geteuid", lambda: -1)
    monkeypatch.setattr(peer_socket, "MEETING_S", 0.05)
    with pytest.raises(LostPeerError, match=r"Connection timed out: rank 1 did not connect in 0 s"):
        listener.accept([(1, 0)])
    with pytest.raises(LostPeerError, match="Connection closed by peer"):
        peer.receive(1)


def test_a_process_that_no_longer_listens_is_lost():
    listener = PeerListener()
    listener.accept([])
    with pytest.raises(LostPeerError, match="Connection refused: the process at 'pipedejavu-"):
        connect_peer(listener.address, 1, 0)


def test_all_ranks_connect_over_all_pairs_of_them():
    """Pairs may repeat: each is a connection of its own."""
    pairs = [(0, 1), (1, 0), (0, 2), (2, 1), (0, 1)]
    listeners = [PeerListener() for _ in range(3)]
    addresses = {rank: listener.address for rank, listener in enumerate(listeners)}
    results = [None] * 3

    def connect(rank):
        results[rank] = connect_all(rank, listeners[rank], addresses, pairs)

    threads = [threading.Thread(target=connect, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for number, (one, other) in enumerate(pairs):
        results[one][number].send(bytes([number]))
        assert results[other][number].receive(1) == bytes([number])
    assert [set(made) for made in results] == [{0, 1, 2, 4}, {0, 1, 3, 4}, {2, 3}]


def test_frames_that_arrive_in_pieces_are_whole():
    one, other = socket.socketpair()
    peer = PeerSocket(other)
    frame = peer_socket.FRAME.pack(3, 4, 5)
    sent = threading.Timer(0.02, lambda: one.sendall(frame[5:]))
    one.sendall(frame[:5])
    sent.start()
    assert peer.has_input()
    assert peer.receive_frame() == (3, 4, 5)
    assert not peer.has_input()
    one.close()
    assert peer.has_input()  # the end
