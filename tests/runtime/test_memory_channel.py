"""Channels through shared memory: order, content, reuse and growth of slots, faulty peers, and peers that die."""

import os
import random
import signal
import socket
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from pipedejavu.facts import InputError
from pipedejavu.facts.message_memory import PAGE_BYTES
from pipedejavu.runtime.memory_channel import FREE, LAYOUT, MESSAGE, MOST_SLOTS, NO_SLOT, ReceiveEnd, SendEnd
from pipedejavu.runtime.memory_slot import SLOT
from pipedejavu.runtime.message_layout import DTYPES, MessageLayout, TensorLayout
from pipedejavu.runtime.peer_socket import LostPeerError, PeerSocket


def pair():
    return tuple(PeerSocket(end) for end in socket.socketpair())


def channel():
    one, other = pair()
    return SendEnd(one), ReceiveEnd(other)


def in_thread(call):
    results = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()

    def result():
        thread.join(20)
        assert not thread.is_alive()
        return results[0]

    return result


def message(n, source):
    """Tensors of every kind: empty, of no dimension, strided, conjugate, and of a size that varies by a factor 10^5."""
    size = source.choice([0, 1, 7, 100, 4096, 50_000])
    generator = torch.Generator().manual_seed(n)
    whole = torch.randn(size, 2, generator=generator)
    return (
        whole,
        whole.t(),
        whole[:, 1],
        torch.tensor(n),
        whole > 0,
        whole.bfloat16(),
        torch.view_as_complex(whole).conj(),
        (whole * 100).to(torch.int64),
        torch.empty(3, 0),
    )[source.randrange(9) :]


@pytest.mark.parametrize("late", ["nobody", "receiver", "sender"])
def test_messages_of_all_sizes_arrive_in_order_whoever_is_late(late):
    sender, receiver = channel()
    sent = [message(n, random.Random(n)) for n in range(60)]
    pauses = random.Random(1)

    def receive():
        received = []
        for _ in sent:
            time.sleep(pauses.random() * 3e-3 * (late == "receiver"))
            received.append(receiver.receive())
        return received

    received = in_thread(receive)
    for tensors in sent:
        time.sleep(pauses.random() * 3e-3 * (late == "sender"))
        sender.send(tensors)
    sender.flush()
    for tensors, arrived in zip(sent, received(), strict=True):
        assert [(t.dtype, t.shape) for t in arrived] == [(t.dtype, t.shape) for t in tensors]
        assert all(torch.equal(a, b) for a, b in zip(tensors, arrived, strict=True))
        assert all(t.is_contiguous() and not t.is_conj() for t in arrived)
    assert len(sender._slots) <= MOST_SLOTS["cpu"]
    assert sender.messages == sum(map(len, sent))
    assert sender.size_bytes == sum(t.nbytes for tensors in sent for t in tensors)


def test_both_directions_pass_more_than_the_slots_hold_at_the_same_time():
    there, here_back = channel()
    back, there_back = channel()
    values = [torch.full((30_000,), n) for n in range(40)]

    def end(sender, receiver):
        def receive():
            return [int(receiver.receive()[0][-1]) for _ in values]

        received = in_thread(receive)
        for value in values:
            sender.send((value,))
        return received()

    other = in_thread(lambda: end(back, here_back))
    assert end(there, there_back) == [*range(40)]
    assert other() == [*range(40)]


def test_what_was_sent_does_not_change_with_its_tensor_or_with_later_messages():
    sender, receiver = channel()
    value = torch.zeros(1000)
    for n in range(MOST_SLOTS["cpu"]):
        value.fill_(n)
        sender.send((value,))
    first = receiver.receive()[0]
    value.fill_(9)
    sender.send((value,))  # into the slot of the first
    assert first.eq(0).all()
    assert [int(receiver.receive()[0][0]) for _ in range(MOST_SLOTS["cpu"])] == [1, 2, 3, 9]


def test_a_sender_waits_once_all_slots_are_full():
    sender, receiver = channel()
    for n in range(MOST_SLOTS["cpu"]):
        sender.send((torch.tensor(n),))
    sent = threading.Event()

    def send():
        sender.send((torch.tensor(-1),))
        sent.set()

    finish = in_thread(send)
    assert not sent.wait(0.05)
    receiver.receive()
    assert sent.wait(20)
    finish()


def test_full_slots_grow_and_small_messages_reuse_them():
    sender, receiver = channel()
    for count in (1, 1, 1, 1, PAGE_BYTES, 10 * PAGE_BYTES, 3, 10 * PAGE_BYTES):
        for n in range(MOST_SLOTS["cpu"]):
            sender.send((torch.full((count,), n, dtype=torch.uint8),))
        for n in range(MOST_SLOTS["cpu"]):
            (arrived,) = receiver.receive()
            assert arrived.shape == (count,)
            assert arrived.eq(n).all()
    assert [slot.size_bytes for slot in sender._slots] == [10 * PAGE_BYTES] * MOST_SLOTS["cpu"]
    assert not sender._replaced


def test_shared_memory_is_gone_with_its_processes():
    """Nothing is on a disk or has a name, and no file stays open: the memory lives as long as its mappings."""
    opened = {*Path("/proc/self/fd").iterdir()}
    sender, receiver = channel()
    sender.send((torch.ones(100_000),))
    receiver.receive()
    assert not [*Path("/dev/shm").glob("*pipedejavu-slot*")]
    assert "pipedejavu-slot" in Path("/proc/self/maps").read_text()
    sender.close()
    receiver.close()
    del sender, receiver
    assert {*Path("/proc/self/fd").iterdir()} <= opened
    assert "pipedejavu-slot" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layout_survives_its_form(dtype):
    layout = MessageLayout.of((torch.empty(2, 0, 3, dtype=dtype), torch.empty((), dtype=dtype)))
    assert MessageLayout.unpack(layout.pack()) == layout


def test_a_dtype_without_a_number_is_refused():
    with pytest.raises(InputError, match=r"tensors of torch\.qint8 do not pass between processes; use one of float32,"):
        MessageLayout((TensorLayout(torch.qint8, (1,)),)).pack()


@pytest.mark.parametrize("form", [b"\x00", b"\xff\x00", b"\x00\x02" + bytes(8)])
def test_a_layout_that_cannot_be_read_is_refused(form):
    with pytest.raises(ValueError, match="a peer sent a layout that cannot be read"):
        MessageLayout.unpack(form)


@pytest.mark.parametrize(
    ("frames", "fault"),
    [
        ([(99, 0, 0)], "unknown kind 99"),
        ([(LAYOUT, 0, 1 << 40)], "a layout of 1099511627776 bytes; at most"),
        ([(MESSAGE, NO_SLOT, 5)], "of layout 5 in slot 4294967295, which it never announced"),
        ([(SLOT, 0, 4096)], "came without its file"),
    ],
)
def test_a_peer_that_breaks_the_protocol_is_refused(frames, fault):
    one, other = pair()
    for frame in frames:
        one.send_frame(*frame)
    with pytest.raises(ValueError, match=fault):
        ReceiveEnd(other).receive()


def test_a_slot_smaller_than_announced_is_refused():
    one, other = pair()
    file = os.memfd_create("small")
    one.send_frame(SLOT, 0, 4096, (file,))
    os.close(file)
    with pytest.raises(ValueError, match="announced 4096 bytes of shared memory and its file holds 0"):
        ReceiveEnd(other).receive()


def test_a_message_larger_than_its_slot_is_refused():
    sender, receiver = channel()
    sender.send((torch.ones(10),))
    receiver.receive()
    form = MessageLayout.of((torch.ones(PAGE_BYTES),)).pack()
    sender.peer.send_frame(LAYOUT, 7, len(form))
    sender.peer.send(form)
    sender.peer.send_frame(MESSAGE, 0, 7)
    with pytest.raises(ValueError, match="a message of 262144 bytes does not fit its slot of 65536 bytes"):
        receiver.receive()


def test_a_slot_that_was_never_made_is_not_given_back():
    sender, receiver = channel()
    receiver.peer.send_frame(FREE, 3, 0)
    with pytest.raises(ValueError, match="frame 4 for slot 3, and 0 slots are known"):
        sender.send((torch.ones(1),))


def serve(address, rank):
    """Sends without an end; the parent kills this process in the middle."""
    from pipedejavu.runtime.peer_socket import connect_peer

    sender = SendEnd(connect_peer(address, rank, 0))
    while True:
        sender.send((torch.ones(200_000),))


def test_a_peer_that_is_killed_ends_the_wait():
    from pipedejavu.runtime.peer_socket import PeerListener

    listener = PeerListener()
    process = get_context("spawn").Process(target=serve, args=(listener.address, 1), daemon=True)
    process.start()
    receiver = ReceiveEnd(listener.accept([(1, 0)])[1, 0])
    for _ in range(5):
        receiver.receive()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(LostPeerError, match="Connection closed by peer"):
        [receiver.receive() for _ in range(100)]
    process.join()


def test_a_receiver_that_is_gone_ends_the_sends():
    sender, receiver = channel()
    receiver.close()
    with pytest.raises(LostPeerError, match="Connection closed by peer"):
        [sender.send((torch.ones(1),)) for _ in range(100)]
